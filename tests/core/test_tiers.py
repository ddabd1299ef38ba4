"""Words of tiers as journals keep them, and settings of tiers that cannot be."""

import pytest

from jdisagg.core.codec import decode, encode
from jdisagg.core.errors import ConfigError
from jdisagg.core.request import Attempt, RequestId, WorkerId
from jdisagg.core.settings import Settings
from jdisagg.core.tiers import DropPages, InsertPages, MovePages, PageMove, PagesFound, PagesMoved, Tier
from jdisagg.core.worker_config import Role, WorkerConfig

MOVE = PageMove(Attempt(RequestId("fetch"), 3), Tier.DISK, Tier.HBM, bytes(range(32)), (4, 9), (1, 2))


@pytest.mark.parametrize(
    "word",
    [
        MovePages(MOVE),
        InsertPages(MOVE, (True, False)),
        DropPages(MOVE),
        PagesMoved(MOVE, (True, False), 0.25, 4096),
        PagesMoved(MOVE, (False, False), failed="no answer"),
        PagesFound((7,), bytes(16)),
    ],
    ids=lambda word: type(word).__name__,
)
def test_words_of_tiers_come_back_from_a_journal_as_they_were(word):
    assert decode(encode(word)) == word


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"disk_tokens": 64}, "--disk_path='' and --disk_tokens=64"),
        ({"disk_path": "/somewhere"}, "--disk_path='/somewhere' and --disk_tokens=0"),
        ({"dram_tokens": -1}, "--dram_tokens is -1"),
        ({"dram_tokens": 64, "prefix_caching": "off"}, "--prefix_caching=off"),
        ({"pool": "redis://127.0.0.1:1", "prefix_caching": "off"}, "--prefix_caching=off"),
        ({"dram_tokens": 64, "group": "one"}, "--dram_tokens=64 and --group=one"),
        (
            {"disk_path": "/x", "disk_tokens": 9, "pool": "file:///x", "group": "one"},
            "--disk_tokens=9 --pool=file:///x",
        ),
        ({"tier_compress": "int2"}, "--tier_compress is 'int2'"),
    ],
)
def test_settings_of_tiers_that_cannot_be_are_refused_with_their_values(given, said):
    with pytest.raises(ConfigError, match=said):
        Settings(**given).check()


def test_a_worker_has_tiers_only_where_it_keeps_pages_for_their_content():
    def config(**sizes: object) -> WorkerConfig:
        return WorkerConfig(WorkerId("w"), Role.COLOCATED, 8, 4, 32, **sizes)  # type: ignore[arg-type]

    kept = {"prefix_caching": True}
    assert not config(dram_pages=8).has_tiers and not config(**kept).has_tiers
    assert all(
        config(**kept, **each).has_tiers for each in ({"dram_pages": 1}, {"disk_pages": 1}, {"shared_pool": True})
    )
    with pytest.raises(ConfigError, match="dram_pages is -1"):
        config(dram_pages=-1).check()
