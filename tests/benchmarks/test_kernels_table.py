"""Kernel tables are made of the measured files."""

import json

from benchmarks import kernels_table

ROW = {
    "operation": "paged_attention",
    "shape": "64 slots x 4,096 tokens",
    "page_size": 32,
    "headline": True,
    "best_ms": 0.51234,
    "share": 0.873,
    "target": 0.85,
    "verdict": "met",
    "peers": {"a": 0.9, "b": 0.7, "c": "did not run"},
}
RECORD = {
    "date": "2026-11-20T10:00:00+00:00",
    "command": "python -m benchmarks.kernels",
    "versions": {"jax": "0.10.2"},
    "machine": {"cores": 4},
    "device": {"platform": "gpu", "name": "Some GPU", "count": 1},
    "rows": [ROW, ROW | {"shape": "a shape of no importance", "headline": False}],
}


def test_every_file_names_its_device_versions_date_and_command():
    for path in kernels_table.RESULTS.glob("kernels_*.json"):
        record = json.loads(path.read_text())
        assert record["device"]["name"] and record["versions"]["jax"] and record["date"] and record["command"]
        assert any(row["headline"] for row in record["rows"])


def test_without_a_gpu_its_rows_say_not_measured_yet():
    on_cpu = RECORD | {"device": {"platform": "cpu", "name": "Some CPU", "count": 1}}
    text = kernels_table.tables([on_cpu])
    assert text.count("not measured yet") == 3 * len(kernels_table.GPU_TARGETS)
    assert text.index("**GPU**") < text.index("**4 cores of Some CPU**")


def test_a_measured_gpu_shows_its_headlines_and_the_best_peer():
    text = kernels_table.tables([RECORD])
    assert "not measured yet" not in text and "no importance" not in text
    line = "| `paged_attention` | 64 slots x 4,096 tokens | 32 | 0.512 | 87 % (met) | 85 % | 0.7 ms, b |"
    assert line in text
