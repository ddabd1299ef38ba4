"""The file of a batch's answers: a line of JSON each, whole or not at all, and never a line that is somebody else's."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from jdisagg.core.errors import OutputError


@dataclass(frozen=True, slots=True)
class Rows:
    """What lines of answers look like: how all of them begin, and which line of the prompts one answers, if any."""

    begins: bytes
    line_of: Callable[[Any], int | None]


def _answered(row: Any) -> int | None:
    if not isinstance(row, dict) or type(row.get("line")) is not int:
        return None
    return row["line"] if isinstance(row.get("text", row.get("error")), str) else None


PLAIN = Rows(b'{"line": ', _answered)


class AnswerFile:
    """An --output that is open for one run: what it has already, and room for more. It is locked until closed."""

    def __init__(self, path: Path, lines: Collection[int], prompts: Path, rows: Rows = PLAIN) -> None:
        """Takes up the file where an earlier run stopped, or begins it; `lines` are those that `prompts` has.

        Raises OutputError, the file untouched, where a line of it is not an answer to one of `lines`, where it is the
        file of prompts, a link, a pipe or a device, or where another process writes it.
        """
        self.path, self._rows = path, rows
        self._refuse_what_is_no_file(prompts)
        self._is_new = not path.exists()
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise self._error(error.strerror) from error
        try:
            self._lock()
            self.done, self._end = self._taken_up(lines)
            self._cut()
        except OutputError:
            os.close(self._file)
            raise

    def _error(self, why: str | None) -> OutputError:
        return OutputError(f"--output={self.path}: {why}")

    def _refuse_what_is_no_file(self, prompts: Path) -> None:
        try:
            found = self.path.lstat()
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            raise self._error(getattr(error, "strerror", None) or str(error)) from error
        if stat.S_ISLNK(found.st_mode):
            raise self._error(f"is a link to {os.readlink(self.path)}; name the file itself")
        if not stat.S_ISREG(found.st_mode):
            raise self._error("is a folder, a pipe or a device, not a regular file")
        if prompts.exists() and self.path.samefile(prompts):
            raise self._error(f"is the file of --prompts={prompts}")

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise self._error(f"another process writes it ({error.strerror})") from error

    def _taken_up(self, lines: Collection[int]) -> tuple[set[int], int]:
        """Which lines are answered, and where the last whole answer ends."""
        done: set[int] = set()
        end = 0
        with os.fdopen(os.dup(self._file), "rb") as file:
            for number, text in enumerate(file, start=1):
                line = self._line_of(text)
                if line is not None and line in lines:
                    done.add(line)
                    end += len(text)
                elif line is not None:
                    raise self._error(f"line {number} answers line {line + 1} of other prompts: it has no such line")
                elif not self._was_cut_off(text):
                    raise self._error(f"line {number} is not an answer of this command; nothing was changed")
        return done, end

    def _line_of(self, text: bytes) -> int | None:
        """None where it is no whole answer."""
        try:
            return self._rows.line_of(json.loads(text)) if text.endswith(b"\n") else None
        except (ValueError, RecursionError):
            return None

    def _was_cut_off(self, text: bytes) -> bool:
        """Whether it is the beginning of an answer, the end of which was never written."""
        begins = self._rows.begins
        return not text.endswith(b"\n") and (text.startswith(begins) or begins.startswith(text))

    def _cut(self) -> None:
        """Drops what a crash or a full disk left of a line."""
        try:
            os.ftruncate(self._file, self._end)
            os.lseek(self._file, self._end, os.SEEK_SET)
        except OSError as error:
            raise self._error(error.strerror) from error

    def write(self, row: Mapping[str, Any]) -> None:
        """Adds one answer, its name first. Raises OutputError where there is no room for all of it: none stays."""
        text = json.dumps(row).encode() + b"\n"
        left = memoryview(text)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            self._cut()
            why = f"{error.strerror}; what it has is whole, and the next run goes on from there"
            raise self._error(why) from error
        self._end += len(text)

    def close(self) -> None:
        """A file that was begun and got no answer goes."""
        if self._is_new and not self._end:
            self.path.unlink(missing_ok=True)
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
