"""Readers of the public formats, gzip or plain. A wrong file is refused with its name, line and what was expected."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from jdisagg.core.errors import ConfigError
from jdisagg.sim.traces.trace import Trace

MOONCAKE_BLOCK_TOKENS = 512
SERVEGEN_WINDOW_S = 600.0

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
