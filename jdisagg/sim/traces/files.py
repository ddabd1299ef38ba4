"""Readers of the public formats, gzip or plain. A wrong file is refused with its name, line and what was expected."""

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
    """Azure's LLM inference traces of 2023 (Patel et al., ISCA 2024): TIMESTAMP, ContextTokens, GeneratedTokens."""
    rows = _csv(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
    times = np.array([_seconds(row[0], path) for row in rows])
    return _trace(times - times.min() if len(times) else times, [row[1] for row in rows], [row[2] for row in rows])


def read_mooncake(path: Path | str) -> Trace:
    """Mooncake's traces (Qin et al., FAST 2025): JSON lines of timestamp (ms), lengths, and hash_ids of 512 tokens."""
    rows = [_mooncake_row(line, number, path) for number, line in enumerate(_lines(path), 1) if line.strip()]
    rows.sort(key=lambda row: row[0])
    hashes = tuple(tuple(row[3]) for row in rows)
    times = np.array([row[0] / 1000.0 for row in rows])
    return _trace(times, [row[1] for row in rows], [row[2] for row in rows], hashes, MOONCAKE_BLOCK_TOKENS)


def read_lengths(path: Path | str) -> Trace:
    """Length files of Sarathi-Serve and Vidur: num_prefill_tokens, num_decode_tokens. All arrive at 0: draw times."""
    rows = _csv(path, ("num_prefill_tokens", "num_decode_tokens"))
    return _trace(np.zeros(len(rows)), [row[0] for row in rows], [row[1] for row in rows])


def read_servegen_rates(path: Path | str, model: str) -> np.ndarray:
    """Mean requests a second of each 600 s window, f64[W], of one model of ServeGen's summed rates
    (model, window_start_s, rate_rps; ServeGen, arXiv 2505.09999)."""
    rows = [row for row in _csv(path, ("model", "window_start_s", "rate_rps")) if row[0] == model]
    if not rows:
        raise ConfigError(f"{path}: no rates of {model!r}")
    return np.array([float(row[2]) for row in sorted(rows, key=lambda row: float(row[1]))])


def _trace(times: np.ndarray, inputs: list, outputs: list, hashes: tuple = (), block_tokens: int = 0) -> Trace:
    input_tokens, output_tokens = (np.maximum(1, np.array(column, dtype=np.int64)) for column in (inputs, outputs))
    return Trace(times.astype(np.float64), input_tokens, output_tokens, hashes, block_tokens)


def _lines(path: Path | str) -> Iterator[str]:
    opened = gzip.open if str(path).endswith(".gz") else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            yield from file
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _csv(path: Path | str, columns: tuple[str, ...]) -> list[list[str]]:
    """The named columns of every row."""
    rows = csv.DictReader(_lines(path))
    missing = [name for name in columns if name not in (rows.fieldnames or ())]
    if missing:
        raise ConfigError(f"{path}: no column {', '.join(missing)} among {rows.fieldnames}")
    return [[row[name] for name in columns] for row in rows]


def _seconds(text: str, path: Path | str) -> float:
    """Seconds of "2023-11-16 18:17:03.9799600": tenths of microseconds, which no parser of the library takes."""
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


# ServeGen's clients (arXiv 2505.09999): rates of each by windows of ten minutes, and its lengths by windows of
# hours.
#
# A file is a tar of `chunk-N-trace.csv` (start of a window in s, requests a second, and what gaps look like,
# without a head) and `chunk-N-dataset.json` (by the start of a window, histograms of input_tokens and
# output_tokens as text). They are statistics: what is drawn from them is a synthetic trace. Gaps are drawn
# exponential: bursts within ten minutes, which ServeGen describes as well, are left out.

TRACE, LENGTHS = "-trace.csv", "-dataset.json"
Histogram = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]  # tokens, and how often
Columns = tuple[npt.NDArray[np.float64], npt.NDArray[np.int64], npt.NDArray[np.int64]]


def read_servegen_clients(path: Path | str, requests: int, seed: int = 0) -> Trace:
    """About so many requests of all clients, drawn; their rates scaled alike. Raises ConfigError."""
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
    whole = sum(float(each.sum()) for each in rates.values()) * SERVEGEN_WINDOW_S
    parts = [
        _drawn(rates[name] * (requests / whole), _histograms(texts[name + LENGTHS]), random)
        for name in clients
        if name + LENGTHS in texts
    ]
    arrival_s, inputs, outputs = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(arrival_s, kind="stable")
    return Trace(arrival_s[order], inputs[order], outputs[order])


def _text(file: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    opened = file.extractfile(member)
    assert opened is not None, member.name
    return opened.read().decode()


def _rates(text: str) -> npt.NDArray[np.float64]:
    rows = sorted((float(row[0]), float(row[1])) for row in csv.reader(io.StringIO(text)) if row)
    return np.array([rate for _, rate in rows])


def _histograms(text: str) -> dict[float, tuple[Histogram, Histogram]]:
    """By the start of their window; those in which nothing was seen are left out."""
    found = dict[float, tuple[Histogram, Histogram]]()
    for start, each in json.loads(text).items():
        inputs, outputs = (_histogram(each[name]) for name in ("input_tokens", "output_tokens"))
        if len(inputs[0]) and len(outputs[0]):
            found[float(start)] = inputs, outputs
    return found


def _histogram(text: str) -> Histogram:
    shares: dict[int, float] = ast.literal_eval(text)
    counts = np.array(list(shares.values()), np.float64)
    kept = counts > 0
    tokens = np.array(list(shares), np.int64)[kept]
    return np.maximum(1, tokens), counts[kept] / counts.sum() if kept.any() else counts[kept]


def _drawn(
    rates: npt.NDArray[np.float64], lengths: dict[float, tuple[Histogram, Histogram]], random: np.random.Generator
) -> Columns:
    """Of one client: by each window's rate, lengths of the latest hours that are known; of none, nothing."""
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
