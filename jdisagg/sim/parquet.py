"""Writes the requests of a simulated workload as a Parquet file; loaded only for --parquet, since it needs pyarrow."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from jdisagg.core.errors import ConfigError
from jdisagg.sim.outcome import Outcome, columns


def write_parquet(outcome: Outcome, path: Path | str) -> None:
    """Writes the columns of `outcome.columns`, one row per request. Raises ConfigError if it cannot."""
    try:
        pq.write_table(pa.table(columns(outcome)), path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
