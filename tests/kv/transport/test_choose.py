"""Which transport two processes use follows from what both say of themselves."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from jdisagg.core.errors import ConfigError, PeerMismatch, TransferRefused
from jdisagg.kv.transport.choose import Capability, capability, choose, open_transport, read_capability
from jdisagg.kv.transport.config import TransportConfig
from tests.kv.transport.peer import IDENTITY, SECRET

ME = Capability("host-a", "process-1", "cpu", "0.1.0", "0.10.2", ("inproc", "shm", "jax_transfer", "nixl", "tcp"))
NEIGHBOUR = replace(ME, process="process-2")
STRANGER = replace(NEIGHBOUR, host="host-b")


def on_tpu(each: Capability) -> Capability:
    return replace(each, platform="tpu")


@pytest.mark.parametrize(
    ("mine", "theirs", "chosen"),
    [
        (ME, ME, "inproc"),
        (ME, NEIGHBOUR, "shm"),
        (ME, STRANGER, "tcp"),
        (on_tpu(ME), on_tpu(STRANGER), "jax_transfer"),
        (on_tpu(ME), on_tpu(NEIGHBOUR), "shm"),
        (on_tpu(ME), STRANGER, "tcp"),
        (on_tpu(ME), replace(on_tpu(STRANGER), jax_version="0.11.2"), "tcp"),
        (ME, replace(NEIGHBOUR, transports=("inproc", "tcp")), "tcp"),
    ],
)
def test_the_fastest_that_both_share_is_chosen_by_both(mine: Capability, theirs: Capability, chosen: str):
    assert choose(mine, theirs) == choose(theirs, mine) == chosen


def test_one_that_was_asked_for_is_taken_or_refused_but_never_replaced():
    assert choose(ME, STRANGER, "jax_transfer") == "jax_transfer"
    assert choose(ME, STRANGER, "nixl") == "nixl"
    with pytest.raises(TransferRefused, match=r"host-a.*host-b"):
        choose(ME, STRANGER, "shm")
    with pytest.raises(TransferRefused, match=r"nixl"):
        choose(ME, replace(STRANGER, transports=("tcp",)), "nixl")


def test_another_version_shares_nothing():
    with pytest.raises(PeerMismatch, match=r"9\.9\.9.*0\.1\.0"):
        choose(ME, replace(ME, version="9.9.9"))


def test_a_capability_survives_its_json_and_anything_else_is_refused():
    mine = capability("cpu")
    assert read_capability(json.loads(json.dumps(mine.to_json()))) == mine
    assert {"inproc", "tcp"} <= set(mine.transports)
    with pytest.raises(PeerMismatch, match="transports"):
        read_capability(dict.fromkeys(("host", "process", "platform", "version", "jax_version"), "x"))


def test_a_transport_that_is_none_is_refused_by_name():
    with pytest.raises(ConfigError, match="'carrier pigeon'"):
        open_transport("carrier pigeon", TransportConfig(SECRET, IDENTITY))
