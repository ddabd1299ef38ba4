"""The journal's file is its owner's alone, and a disk that is full costs the record and nothing else."""

from __future__ import annotations

import logging
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jdisagg.core.errors import ConfigError
from jdisagg.core.events import ROUTER, TimerFired
from jdisagg.core.journal import Header, read_lines
from jdisagg.core.router_config import RouterConfig
from jdisagg.serve.observability.records import open_journal
from tests.sim.cases import pair

HEADER = Header(RouterConfig(), tuple(pair()))


def never() -> None:
    raise AssertionError("nothing was dropped")


@contextmanager
def full_at(size: int) -> Iterator[None]:
    """No file of this process grows over `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_only_its_owner_reads_a_journal_and_its_folder(tmp_path: Path) -> None:
    open_journal(HEADER, str(tmp_path / "records"), never)
    (file,) = (tmp_path / "records").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_a_disk_that_gets_full_ends_the_record_with_one_line_and_the_journal_goes_on_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dropped: list[int] = []
    journal = open_journal(HEADER, str(tmp_path), lambda: dropped.append(1))
    (file,) = tmp_path.iterdir()
    journal.record(1.0, ROUTER, TimerFired("a"), [])
    with full_at(file.stat().st_size + 20), caplog.at_level(logging.ERROR):
        for number in range(50):
            journal.record(2.0 + number, ROUTER, TimerFired("b"), [])
    assert dropped == [1] and journal.num_recorded == 51
    (line,) = [record.message for record in caplog.records]
    assert "takes no more" in line and "serving goes on" in line
    whole = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    assert [entry.event for entry in read_lines(whole)[1]] == [TimerFired("a")]


@pytest.mark.parametrize("folder", ["a-file", "a-file/below", "/proc/nowhere", "x" * 300, "nul\0"])
def test_a_folder_that_cannot_be_written_is_refused_at_the_start_by_its_flag(tmp_path: Path, folder: str) -> None:
    (tmp_path / "a-file").write_text("precious")
    with pytest.raises(ConfigError, match=r"--record_dir=.*: \S") as found:
        open_journal(HEADER, str(tmp_path / folder), never)
    assert "\n" not in str(found.value) and (tmp_path / "a-file").read_text() == "precious"


def test_a_disk_that_is_full_at_the_start_is_refused_at_the_start(tmp_path: Path) -> None:
    with full_at(10), pytest.raises(ConfigError, match="--record_dir="):
        open_journal(HEADER, str(tmp_path), never)
