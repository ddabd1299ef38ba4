"""What the benchmark of tiers compares is the same bytes, and both ways."""

import json

from benchmarks.all import RESULTS
from benchmarks.tiers import AIMS, TTFT_AIMS, main, stores


def test_every_store_is_held_against_its_bare_counterpart_both_ways():
    rows = list(stores(count=3, record_bytes=1 << 16, rounds=2))
    assert [(row.store, row.way) for row in rows] == [(store, way) for store in AIMS for way in ("put", "get")]
    assert all(min(row.gb_per_s, row.bare_gb_per_s, row.share, row.best_share) >= 0 for row in rows)


def test_a_small_run_writes_what_the_stored_result_holds(tmp_path):
    main(["--rounds=1", "--records=2", "--record_kb=64", f"--output={tmp_path}/small.json"])
    small = json.loads((tmp_path / "small.json").read_text())
    stored = json.loads((RESULTS / "tiers_cpu.json").read_text())
    assert small.keys() == stored.keys() and small["rows"][0].keys() == stored["rows"][0].keys()
    assert [each["tier"] for each in stored["first_tokens"]] == [*TTFT_AIMS]
    assert all(each["cached_tokens"] > 0 for each in stored["first_tokens"])
