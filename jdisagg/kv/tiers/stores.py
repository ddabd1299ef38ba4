"""Stores of page records: the protocol, a file on disk and host memory."""

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


class PoolError(OSError):
    """Raised when a pool did not answer, or not in time."""


Good = tuple[bool, ...]  # one per page, in order


class PageStore(Protocol):
    """A store of page records. Reader threads call it; calls block. Raises OSError if the store does not answer."""

    def put(self, pages: Sequence[int], names: Sequence[bytes], records: np.ndarray) -> Good:
        """Stores u8[n, record_bytes] under page numbers (a worker's tiers) or names (the shared pool). Returns True for
        each page that was stored."""
        ...

    def get(self, pages: Sequence[int], names: Sequence[bytes], records: np.ndarray) -> Good:
        """Fills records; False for a page that is absent or differs from what was put. Its record may then hold
        anything."""
        ...

    def close(self) -> None: ...


# Records in one preallocated file, with an index that survives the process.
#
# The file begins with a header (fingerprint, record size, number of pages). One index entry per page follows, then the
# records. A page is written in three steps: its entry is erased, its record is written, its entry is written with the
# record's name and digest and a checksum of its own. A crash in between leaves an entry that is erased or does not
# match its record. The first is no page; the second is noticed at the read.

MAGIC = b"jdisagg kv\n"
HEADER = struct.Struct("<11s32sQQ")  # magic, fingerprint, bytes per record, pages
ENTRY = struct.Struct(f"<16s{DIGEST_BYTES}sI")  # name, digest, checksum of both
HEADER_BYTES = 4096
BLOCK = 4096  # records begin at multiples of this size
THREADS = 4


class FileInUseError(ConfigError):
    """Raised when another worker uses the file."""


class DiskStore:
    """Implements `PageStore` by page numbers in one file. One process at a time may use the file."""

    def __init__(self, path: Path, num_pages: int, record_bytes: int, fingerprint: str) -> None:
        """Opens or creates the file. Raises ConfigError if it holds something else, is in use, or has no room."""
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
            raise FileInUseError(f"--disk_path: {self.path} is in use by another worker") from error

    def _open(self, fingerprint: str) -> None:
        header = os.pread(self._file, HEADER.size, 0)
        if header.strip(b"\0"):
            self._check(header, fingerprint)
            return
        try:
            os.posix_fallocate(self._file, 0, self._records_at + self.num_pages * self._stride)
        except OSError as error:
            size = self._records_at + self.num_pages * self._stride
            os.ftruncate(self._file, 0)
            raise ConfigError(f"--disk_path: no room for {size} bytes at {self.path}: {error.strerror}") from error
        os.pwrite(self._file, HEADER.pack(MAGIC, fingerprint.encode(), self.record_bytes, self.num_pages), 0)

    def _check(self, header: bytes, fingerprint: str) -> None:
        is_ours = len(header) == HEADER.size and header.startswith(MAGIC)
        if not is_ours:
            raise ConfigError(f"--disk_path: {self.path} is no file of KV pages: name another, or remove it")
        _, theirs, record_bytes, num_pages = HEADER.unpack(header)
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

    def found(self) -> list[tuple[int, bytes]]:
        """Returns (page, name) of every intact entry; its record is checked when it is read."""
        size = self.num_pages * ENTRY.size
        index = os.pread(self._file, size, HEADER_BYTES)
        rows = (self._entry(index[page * ENTRY.size : (page + 1) * ENTRY.size]) for page in range(self.num_pages))
        return [(page, row[0]) for page, row in enumerate(rows) if row is not None]

    def _entry(self, entry: bytes) -> tuple[bytes, bytes] | None:
        """Returns (name, digest) if the entry is intact."""
        if len(entry) < ENTRY.size:
            return None
        name, digest, check = ENTRY.unpack(entry)
        return (name, digest) if check and check == _check_of(name, digest) else None

    def put(self, pages: Sequence[int], names: Sequence[bytes], records: np.ndarray) -> Good:
        """Writes the pages in the caller's thread. A file system allows one write to a file at a time. Computing
        digests in other threads costs more in switching than it saves."""
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
    """Returns a checksum that is never 0, since an erased entry holds 0."""
    return zlib.crc32(name + digest) | 1


def _write_all(file: int, data: bytes | np.ndarray, at: int) -> None:
    remaining = memoryview(data if isinstance(data, bytes) else data.data).cast("B")
    while remaining:
        written = os.pwritev(file, [remaining], at)
        remaining, at = remaining[written:], at + written


def _read_all(file: int, record: np.ndarray, at: int) -> bool:
    """Fills the record; returns False if the file ended before."""
    remaining = record.data.cast("B")
    while remaining:
        read = os.preadv(file, [remaining], at)
        if not read:
            return False
        remaining, at = remaining[read:], at + read
    return True


# Records in host memory, which the system allocates at the first write.


class DramStore:
    """Implements `PageStore` by page numbers in host memory. The digests in the records protect them."""

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
        """Does nothing; the memory is freed with the store."""
