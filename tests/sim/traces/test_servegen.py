"""Traces drawn of ServeGen's clients: their rates window by window, their lengths hour by hour."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from jdisagg.core.errors import ConfigError
from jdisagg.sim.traces import one_after_another, read_servegen_clients
from jdisagg.sim.traces.trace import Trace


def tar_of(folder: Path, files: dict[str, str]) -> Path:
    path = folder / "clients.tar.gz"
    with tarfile.open(path, "w:gz") as file:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            file.addfile(member, io.BytesIO(text.encode()))
    return path


def client(rates: list[float], lengths: dict[str, tuple[str, str]]) -> tuple[str, str]:
    rows = "".join(f"{600 * index},{rate},1,Gamma,1,1\n" for index, rate in enumerate(rates))
    known = {start: {"input_tokens": one, "output_tokens": two} for start, (one, two) in lengths.items()}
    return rows, json.dumps(known)


def two_clients(folder: Path) -> Path:
    early = client([1.0, 1.0, 0.0, 0.0], {"0": ("{100: 1.0}", "{7: 1.0}")})
    late = client([0.0, 0.0, 2.0, 2.0], {"0": ("{}", "{}"), "1200": ("{10: 0.5, 20: 0.5}", "{900: 1.0}")})
    names = [f"data/chunk-{number}-{kind}" for number in range(2) for kind in ("trace.csv", "dataset.json")]
    return tar_of(folder, dict(zip(names, (*early, *late), strict=True)))


def test_each_client_comes_when_it_came_with_lengths_of_its_own(tmp_path):
    trace = read_servegen_clients(two_clients(tmp_path), 3000)
    assert abs(len(trace) - 3000) < 300 and (np.diff(trace.arrival_s) >= 0).all()
    first = trace.window(0.0, 1200.0)
    assert set(first.input_tokens) == {100} and set(first.output_tokens) == {7}
    second = trace.window(1200.0, 2400.0)
    assert set(second.input_tokens) == {10, 20} and set(second.output_tokens) == {900}
    assert len(second) == pytest.approx(2 * len(first), rel=0.2)


def test_equal_seeds_draw_equal_traces(tmp_path):
    path = two_clients(tmp_path)
    one, same, other = (read_servegen_clients(path, 200, seed) for seed in (1, 1, 2))
    assert np.array_equal(one.arrival_s, same.arrival_s) and not np.array_equal(
        one.arrival_s[:50], other.arrival_s[:50]
    )


def test_a_file_without_clients_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"clients.tar.gz: no chunk-N-trace.csv"):
        read_servegen_clients(tar_of(tmp_path, {"readme": "none"}), 10)
    (tmp_path / "broken.tar.gz").write_bytes(b"no archive")
    with pytest.raises(ConfigError, match=r"broken.tar.gz: cannot be read"):
        read_servegen_clients(tmp_path / "broken.tar.gz", 10)


def test_traces_follow_one_another():
    some = Trace(np.array([0.0, 3.0]), np.array([5, 6]), np.array([1, 2]))
    both = one_after_another([some, some], 2.0)
    assert both.arrival_s.tolist() == [0.0, 3.0, 5.0, 8.0] and both.input_tokens.tolist() == [5, 6, 5, 6]
