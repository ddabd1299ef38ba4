"""A simulated workload's requests as a Parquet file; needs pyarrow, so it is loaded only where one is asked for."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from jdisagg.core.errors import ConfigError
from jdisagg.sim.outcome import Outcome, columns


def write_parquet(outcome: Outcome, path: Path | str) -> None:
    """The columns of `outcome.columns`, one row a request. Raises ConfigError where the file cannot be written."""
    try:
        pq.write_table(pa.table(columns(outcome)), path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
