"""Readers of the public trace formats, gzip or plain.

A bad file is refused with its name, line and what was expected.
"""

from __future__ import annotations

import ast
import csv
import gzip
import io
import json
import tarfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jdisagg.core.errors import ConfigError
from jdisagg.sim.traces.trace import Trace

MOONCAKE_BLOCK_TOKENS = 512
SERVEGEN_WINDOW_S = 600.0


def read_azure(path: Path | str) -> Trace:
    """Reads Azure's LLM inference traces of 2023 (Patel et al., ISCA 2024). The columns are TIMESTAMP, ContextTokens
    and GeneratedTokens."""
    rows = _csv(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
    times = np.array([_seconds(row[0], path) for row in rows])
    return _trace(times - times.min() if len(times) else times, [row[1] for row in rows], [row[2] for row in rows])


def read_mooncake(path: Path | str) -> Trace:
    """Reads Mooncake's traces (Qin et al., FAST 2025). They are JSON lines of timestamp (ms), lengths, and hash_ids of
    blocks of 512 tokens."""
    rows = [_mooncake_row(line, number, path) for number, line in enumerate(_lines(path), 1) if line.strip()]
    rows.sort(key=lambda row: row[0])
    hashes = tuple(tuple(row[3]) for row in rows)
    times = np.array([row[0] / 1000.0 for row in rows])
    return _trace(times, [row[1] for row in rows], [row[2] for row in rows], hashes, MOONCAKE_BLOCK_TOKENS)


def read_lengths(path: Path | str) -> Trace:
    """Reads length files of Sarathi-Serve and Vidur: num_prefill_tokens, num_decode_tokens; all arrive at 0."""
    rows = _csv(path, ("num_prefill_tokens", "num_decode_tokens"))
    return _trace(np.zeros(len(rows)), [row[0] for row in rows], [row[1] for row in rows])


def read_servegen_rates(path: Path | str, model: str) -> np.ndarray:
    """Returns the mean requests per second of each 600 s window, f64[W], of one model of ServeGen's summed rates. The
    columns are model, window_start_s and rate_rps (ServeGen, arXiv 2505.09999)."""
    rows = [row for row in _csv(path, ("model", "window_start_s", "rate_rps")) if row[0] == model]
    if not rows:
        raise ConfigError(f"{path}: no rates of {model!r}")
    return np.array([float(row[2]) for row in sorted(rows, key=lambda row: float(row[1]))])


def _trace(times: np.ndarray, inputs: list, outputs: list, hashes: tuple = (), block_tokens: int = 0) -> Trace:
    input_tokens, output_tokens = (np.maximum(1, np.array(column, dtype=np.int64)) for column in (inputs, outputs))
    return Trace(times.astype(np.float64), input_tokens, output_tokens, hashes, block_tokens)


def _lines(path: Path | str) -> Iterator[str]:
    open_file = gzip.open if str(path).endswith(".gz") else open
    try:
        with open_file(path, "rt", encoding="utf-8") as file:
            yield from file
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _csv(path: Path | str, columns: tuple[str, ...]) -> list[list[str]]:
    """Returns the named columns of every row."""
    rows = csv.DictReader(_lines(path))
    missing = [name for name in columns if name not in (rows.fieldnames or ())]
    if missing:
        raise ConfigError(f"{path}: no column {', '.join(missing)} among {rows.fieldnames}")
    return [[row[name] for name in columns] for row in rows]


def _seconds(text: str, path: Path | str) -> float:
    """Returns the seconds of "2023-11-16 18:17:03.9799600"; `fromisoformat` does not take its seven decimals."""
    whole, _, fraction = text.partition(".")
    try:
        return datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")
    except ValueError as error:
        raise ConfigError(f"{path}: {text!r} is no time") from error


def _mooncake_row(line: str, number: int, path: Path | str) -> tuple[float, int, int, list[int]]:
    try:
        row: dict[str, Any] = json.loads(line)
        return row["timestamp"], row["input_length"], row["output_length"], row["hash_ids"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: line {number} is no request: {line[:60]!r}") from error


# ServeGen's clients (arXiv 2505.09999): rates of each client in windows of ten minutes, lengths in windows of hours.
#
# A file is a tar of `chunk-N-trace.csv` (window start in s, requests per second, and parameters of the gaps, without a
# header) and `chunk-N-dataset.json` (by window start, histograms of input_tokens and output_tokens as text). These are
# statistics, so a trace drawn from them is synthetic. Gaps are drawn exponential; the bursts within ten minutes that
# ServeGen also describes are left out.

TRACE, LENGTHS = "-trace.csv", "-dataset.json"
Histogram = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]  # tokens and their frequency
Columns = tuple[npt.NDArray[np.float64], npt.NDArray[np.int64], npt.NDArray[np.int64]]


def read_servegen_clients(path: Path | str, requests: int, seed: int = 0) -> Trace:
    """Draws about `requests` requests of all clients, whose rates are scaled by one factor. Raises ConfigError."""
    try:
        with tarfile.open(path) as file:
            members = {each.name: each for each in file.getmembers() if each.isfile()}
            texts = {name: _text(file, each) for name, each in members.items() if name.endswith((TRACE, LENGTHS))}
    except (OSError, tarfile.TarError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    clients = sorted(name.removesuffix(TRACE) for name in texts if name.endswith(TRACE))
    if not clients:
        raise ConfigError(f"{path}: no chunk-N{TRACE} in it")
    random = np.random.default_rng(seed)
    rates = {name: _rates(texts[name + TRACE]) for name in clients}
    expected_requests = sum(float(each.sum()) for each in rates.values()) * SERVEGEN_WINDOW_S
    clients_columns = [
        _draw_client(rates[name] * (requests / expected_requests), _histograms(texts[name + LENGTHS]), random)
        for name in clients
        if name + LENGTHS in texts
    ]
    arrival_s, inputs, outputs = (np.concatenate(column) for column in zip(*clients_columns, strict=True))
    order = np.argsort(arrival_s, kind="stable")
    return Trace(arrival_s[order], inputs[order], outputs[order])


def _text(file: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    content = file.extractfile(member)
    assert content is not None, member.name
    return content.read().decode()


def _rates(text: str) -> npt.NDArray[np.float64]:
    rows = sorted((float(row[0]), float(row[1])) for row in csv.reader(io.StringIO(text)) if row)
    return np.array([rate for _, rate in rows])


def _histograms(text: str) -> dict[float, tuple[Histogram, Histogram]]:
    """Returns the histograms by window start, without windows that have no requests."""
    histograms = dict[float, tuple[Histogram, Histogram]]()
    for start, each in json.loads(text).items():
        inputs, outputs = (_histogram(each[name]) for name in ("input_tokens", "output_tokens"))
        if len(inputs[0]) and len(outputs[0]):
            histograms[float(start)] = inputs, outputs
    return histograms


def _histogram(text: str) -> Histogram:
    shares: dict[int, float] = ast.literal_eval(text)
    counts = np.array(list(shares.values()), np.float64)
    is_used = counts > 0
    tokens = np.array(list(shares), np.int64)[is_used]
    return np.maximum(1, tokens), counts[is_used] / counts.sum() if is_used.any() else counts[is_used]


def _draw_client(
    rates: npt.NDArray[np.float64], lengths: dict[float, tuple[Histogram, Histogram]], random: np.random.Generator
) -> Columns:
    """Draws one client's requests by the rate of each window, with the latest lengths known by then. A client without
    lengths gets no requests."""
    columns: list[Columns] = []
    counts = random.poisson(rates * SERVEGEN_WINDOW_S)
    for window in np.flatnonzero(counts) if lengths else ():
        start_s, count = float(window * SERVEGEN_WINDOW_S), int(counts[window])
        inputs, outputs = lengths[max((each for each in lengths if each <= start_s), default=min(lengths))]
        times = start_s + random.uniform(0.0, SERVEGEN_WINDOW_S, count)
        columns.append(
            (times, random.choice(inputs[0], count, p=inputs[1]), random.choice(outputs[0], count, p=outputs[1]))
        )
    empty = np.zeros(0, np.int64)
    if not columns:
        return np.zeros(0), empty, empty
    times, inputs, outputs = (np.concatenate(column) for column in zip(*columns, strict=True))
    return times, inputs, outputs
