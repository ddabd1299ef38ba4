"""What the leader builds and what a member would build."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jdisagg.core.errors import PeerMismatch
from jdisagg.core.labels import Labels
from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.serve.cluster.group.leader import check_same

DECODE = WorkerConfig(WorkerId("decode-0"), Role.DECODE, 8, 4, 64)


def test_a_member_that_stands_elsewhere_under_another_name_builds_the_leaders_worker():
    check_same(DECODE, replace(DECODE, worker=WorkerId("another"), labels=Labels(process="vm/2", host="vm")))


def test_a_member_of_other_sizes_is_told_both():
    with pytest.raises(PeerMismatch, match="num_pages is 9 at the leader and 8 here"):
        check_same(replace(DECODE, num_pages=9), replace(DECODE, num_pages=8))
