"""What keeps records of pages: one protocol for a worker's own tiers and for the pool."""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np

from jdisagg.core.errors import ConfigError
from jdisagg.core.model_identity import SHORT_DIGITS
from jdisagg.kv.tiers.records import DIGEST_BYTES, digest_of


class PoolFailed(OSError):
    """A pool that did not answer, or not in time."""


Good = tuple[bool, ...]  # of each page, in order


class Store(Protocol):
    """Called from reader threads; blocks. Raises OSError where the store does not answer."""

    def put(self, pages: Sequence[int], names: Sequence[bytes], records: np.ndarray) -> Good:
        """Keeps u8[n, record_bytes] under these numbers (a worker's own) or names (the pool). Which it has taken."""
        ...

    def get(self, pages: Sequence[int], names: Sequence[bytes], records: np.ndarray) -> Good:
        """Fills records; False for a page that is not there, or not as it was put: its record may hold anything."""
        ...

    def close(self) -> None: ...


# Records in one preallocated file, with an index that outlives the process.
#
# The file begins with a header (what the records mean, how large they are, how many), then one index entry a
# page, then the records. A page is written in three steps: its entry is erased, its record is written, its entry
# is written, with the record's name and digest and a checksum of its own. Whatever a crash leaves in between is
# an entry that is erased or does not agree with its record: the first is no page, the second is found out by
# whoever reads it.

MAGIC = b"jdisagg kv\n"
HEADER = struct.Struct("<11s32sQQ")  # magic, fingerprint, bytes a record, pages
ENTRY = struct.Struct(f"<16s{DIGEST_BYTES}sI")  # name, digest, checksum of both
HEADER_BYTES = 4096
BLOCK = 4096  # records begin at multiples of it
THREADS = 4


class FileInUse(ConfigError):
    """Another worker has it."""


class DiskStore:
    """Implements `Store` by page numbers. One process at a time has the file."""

    def __init__(self, path: Path, num_pages: int, record_bytes: int, fingerprint: str) -> None:
        """Opens or makes the file. Raises ConfigError where it holds something else, is another's, or has no room."""
        self.path, self.num_pages, self.record_bytes = path, num_pages, record_bytes
        self._stride = -(-record_bytes // BLOCK) * BLOCK
        self._records_at = HEADER_BYTES + -(-num_pages * ENTRY.size // BLOCK) * BLOCK
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(f"--disk_path: cannot open {path}: {error.strerror}") from error
        try:
            self._claim()
            self._open(fingerprint)
        except BaseException:
            os.close(self._file)
            raise
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="disk")

    def _claim(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise FileInUse(f"--disk_path: {self.path} is in use by another worker") from error

    def _open(self, fingerprint: str) -> None:
        found = os.pread(self._file, HEADER.size, 0)
        if found.strip(b"\0"):
            self._check(found, fingerprint)
            return
        try:
            os.posix_fallocate(self._file, 0, self._records_at + self.num_pages * self._stride)
        except OSError as error:
            size = self._records_at + self.num_pages * self._stride
            os.ftruncate(self._file, 0)
            raise ConfigError(f"--disk_path: no room for {size} bytes at {self.path}: {error.strerror}") from error
        os.pwrite(self._file, HEADER.pack(MAGIC, fingerprint.encode(), self.record_bytes, self.num_pages), 0)

    def _check(self, found: bytes, fingerprint: str) -> None:
        whole = len(found) == HEADER.size and found.startswith(MAGIC)
        if not whole:
            raise ConfigError(f"--disk_path: {self.path} is no file of KV pages: name another, or remove it")
        _, theirs, record_bytes, num_pages = HEADER.unpack(found)
        if theirs.decode(errors="replace") != fingerprint:
            raise ConfigError(
                f"--disk_path: {self.path} holds KV of the fingerprint {theirs.decode(errors='replace')}, this run's"
                f" is {fingerprint} (the first {SHORT_DIGITS} digits are the model's, the others those of the layout of"
                " pages and of how weights are rounded): name another, or remove it"
            )
        if (record_bytes, num_pages) != (self.record_bytes, self.num_pages):
            raise ConfigError(
                f"--disk_path: {self.path} is for {num_pages} pages of {record_bytes} bytes, this run wants"
                f" {self.num_pages} of {self.record_bytes}: give --disk_tokens as it was, or remove it"
            )

    # ------------------------------------------------------------ what it holds

    def found(self) -> list[tuple[int, bytes]]:
        """(page, name) of every entry that is whole; its record is checked when it is read."""
        size = self.num_pages * ENTRY.size
        index = os.pread(self._file, size, HEADER_BYTES)
        rows = (self._entry(index[page * ENTRY.size : (page + 1) * ENTRY.size]) for page in range(self.num_pages))
        return [(page, row[0]) for page, row in enumerate(rows) if row is not None]

    def _entry(self, entry: bytes) -> tuple[bytes, bytes] | None:
        """(name, digest), where the entry is whole."""
        if len(entry) < ENTRY.size:
            return None
        name, digest, check = ENTRY.unpack(entry)
        return (name, digest) if check and check == _check_of(name, digest) else None

    # ------------------------------------------------------------ pages

    def put(self, pages: Sequence[int], names: Sequence[bytes], records: np.ndarray) -> Good:
        """In the caller's thread: a file system takes one write to a file at a time, and digests made in other threads
        beside it cost more in switching than they save."""
        return tuple(self._put(*each) for each in zip(pages, names, records, strict=True))

    def get(self, pages: Sequence[int], names: Sequence[bytes], records: np.ndarray) -> Good:
        return tuple(self._threads.map(self._get, pages, names, records))

    def _put(self, page: int, name: bytes, record: np.ndarray) -> bool:
        digest = digest_of(record)
        try:
            _write_all(self._file, bytes(ENTRY.size), self._entry_at(page))
            _write_all(self._file, record, self._record_at(page))
            _write_all(self._file, ENTRY.pack(name, digest, _check_of(name, digest)), self._entry_at(page))
        except OSError:
            return False
        return True

    def _get(self, page: int, name: bytes, record: np.ndarray) -> bool:
        entry = self._entry(os.pread(self._file, ENTRY.size, self._entry_at(page)))
        if entry is None or entry[0] != name or not _read_all(self._file, record, self._record_at(page)):
            return False
        return digest_of(record) == entry[1]

    def _entry_at(self, page: int) -> int:
        return HEADER_BYTES + page * ENTRY.size

    def _record_at(self, page: int) -> int:
        return self._records_at + page * self._stride

    def close(self) -> None:
        self._threads.shutdown(wait=True)
        os.close(self._file)


def _check_of(name: bytes, digest: bytes) -> int:
    """Never 0, which is what an erased entry holds."""
    return zlib.crc32(name + digest) | 1


def _write_all(file: int, data: bytes | np.ndarray, at: int) -> None:
    left = memoryview(data if isinstance(data, bytes) else data.data).cast("B")
    while left:
        written = os.pwritev(file, [left], at)
        left, at = left[written:], at + written


def _read_all(file: int, record: np.ndarray, at: int) -> bool:
    """Whether the file had it all."""
    left = record.data.cast("B")
    while left:
        read = os.preadv(file, [left], at)
        if not read:
            return False
        left, at = left[read:], at + read
    return True


# Records in the host's memory, which is taken as it is first written.


class DramStore:
    """Implements `Store` by page numbers. The digests in the records guard them; nothing else writes here."""

    def __init__(self, num_pages: int, record_bytes: int) -> None:
        self._records = np.zeros((num_pages, record_bytes), np.uint8)

    def put(self, pages: Sequence[int], names: Sequence[bytes], records: np.ndarray) -> Good:
        for page, record in zip(pages, records, strict=True):
            self._records[page] = record
        return (True,) * len(pages)

    def get(self, pages: Sequence[int], names: Sequence[bytes], records: np.ndarray) -> Good:
        for page, record in zip(pages, records, strict=True):
            record[:] = self._records[page]
        return (True,) * len(pages)

    def close(self) -> None:
        """Its memory goes with it."""
