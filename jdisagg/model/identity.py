"""Computes the identity of a model from every byte of its files, and caches file digests for the next start.

Blocks of all files are hashed in parallel. A cached digest is valid while the file's path, size, inode, mtime and ctime
are unchanged. If the cache is damaged or cannot be written, the files are read again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from jdisagg.core.errors import CheckpointError
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.model_identity import ModelIdentity, config_digest
from jdisagg.model.checkpoint import WEIGHTS, weight_files
from jdisagg.model.draft_head import HeadConfig
from jdisagg.model.files import regular
from jdisagg.model.gguf.file import is_gguf
from jdisagg.model.quantized.config import MODELOPT_FILE
from jdisagg.model.sources import INDEX_FILE

CONFIG_FILES = ("config.json", "generation_config.json", MODELOPT_FILE)
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    *("config.json", "generation_config.json"),  # they contain the end tokens
)
TIMESTAMPS_FILE = "_CHECKPOINT_METADATA"  # Orbax's write times, which do not depend on the arrays
RANDOM, ORBAX = "random", "orbax"
BLOCK_BYTES = 16 << 20
MOST_THREADS = 16
DIGEST_BYTES = 16
SLOW_S = 1.0
SETTLED_NS = 2_000_000_000  # a younger file may change again without a new ctime, whose clock ticks coarsely
CACHE_FILE, CACHE_VERSION = "fingerprints.json", 1

log = logging.getLogger(__name__)


class FileState(NamedTuple):
    """The file attributes that show whether a file may have changed."""

    size: int
    inode: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """Reads the state of a regular file. Raises CheckpointError."""
        try:
            found = regular(path).stat()
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        return cls(found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)


@dataclass(frozen=True)
class ModelFiles:
    """The files that make one model, and the settings that its weights follow from."""

    place: Path
    config: ModelConfig | HeadConfig
    load_format: str = "hf"
    seed: int = 0  # for random weights
    tokenizer: Path | None = None  # the folder or GGUF file of the tokenizer; None for a draft, which has none
    cache: Path | None = None  # the folder of the digest cache; None: no cache

    @cached_property
    def identity(self) -> ModelIdentity:
        """Computes the identity from every byte, or from cached digests. Raises CheckpointError."""
        digests = self._digests
        return ModelIdentity(
            self._weights_digest(digests),
            _combined("config", [config_digest(self.config).encode(), *_named(self._config_files, digests)]),
            _combined("tokenizer", _named(self._tokenizer_files, digests)) if self.tokenizer is not None else "",
        )

    def check_unchanged(self) -> None:
        """Raises CheckpointError if a weight file changed after the identity was computed."""
        for path in self._weight_files.values():
            before, now = self._states[path], FileState.of(path)
            if before._replace(ctime_ns=now.ctime_ns) != now:
                raise CheckpointError(f"{path} changed while the model was loaded: start again")

    def _weights_digest(self, digests: Mapping[Path, bytes]) -> str:
        if self.load_format == RANDOM:
            return _combined("random", [config_digest(self.config).encode(), str(self.seed).encode(), b"float32"])
        return _combined("weights", _named(self._weight_files, digests))

    @cached_property
    def _weight_files(self) -> dict[str, Path]:
        """Returns every file of the weights by its name in the model's folder."""
        if self.load_format == RANDOM:
            return {}
        if self.load_format == ORBAX:
            folder = self.place / WEIGHTS
            files = [path for path in folder.rglob("*") if not path.is_dir() and path.name != TIMESTAMPS_FILE]
            return {path.relative_to(folder).as_posix(): path for path in sorted(files)}
        files = weight_files(self.place)
        return {path.name: path for path in files} | (
            {} if is_gguf(self.place) else _existing(self.place, (INDEX_FILE,))
        )

    @cached_property
    def _config_files(self) -> dict[str, Path]:
        """Returns the configuration's files by name; a GGUF file's configuration is part of the parsed config."""
        return {} if is_gguf(self.place) else _existing(self.place, CONFIG_FILES)

    @cached_property
    def _tokenizer_files(self) -> dict[str, Path]:
        place = self.tokenizer
        if place is None:
            return {}
        if is_gguf(place):
            return {place.name: place}
        templates = sorted((place / "additional_chat_templates").glob("*.jinja"))
        return _existing(place, TOKENIZER_FILES) | {f"{path.parent.name}/{path.name}": path for path in templates}

    @cached_property
    def _paths(self) -> list[Path]:
        files = (self._weight_files, self._config_files, self._tokenizer_files)
        return sorted({path for each in files for path in each.values()})

    @cached_property
    def _states(self) -> dict[Path, FileState]:
        return {path: FileState.of(path) for path in self._paths}

    @cached_property
    def _digests(self) -> dict[Path, bytes]:
        """Finds the digest of each file in the cache or computes it. Raises CheckpointError."""
        states, cached = self._states, DigestCache(self.cache)
        known = cached.find(states)
        missing = [path for path in self._paths if path not in known]
        began_s = time.monotonic()
        computed = hash_files({path: states[path].size for path in missing})
        for path in missing:
            if FileState.of(path) != states[path]:
                raise CheckpointError(f"{path} changed while it was read: start again")
        took_s = time.monotonic() - began_s
        if took_s > SLOW_S:
            size = sum(states[path].size for path in missing)
            later = "every start reads them" if self.cache is None else "the next start reads none that stay the same"
            log.warning("the fingerprint of %s: read %d bytes in %.1f s; %s", self.place, size, took_s, later)
        if missing:
            cached.keep(states, known | computed)
        return known | computed


def _existing(folder: Path, names: Sequence[str]) -> dict[str, Path]:
    """Returns those of the named files that exist, by name."""
    return {name: folder / name for name in names if (folder / name).exists()}


def _named(files: Mapping[str, Path], digests: Mapping[Path, bytes]) -> Iterable[bytes]:
    for name in sorted(files):
        yield from (name.encode(errors="surrogateescape"), digests[files[name]])


def _combined(domain: str, parts: Iterable[bytes]) -> str:
    """Hashes the parts in order, each with its length, under the domain's name."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=domain.encode())
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


# Hashing of files.


def hash_files(sizes: Mapping[Path, int]) -> dict[Path, bytes]:
    """Returns the digest of each file of these sizes; blocks are hashed by several threads. Raises CheckpointError."""
    blocks = [(path, start) for path, size in sizes.items() for start in range(0, size, BLOCK_BYTES)]
    found: dict[Path, list[bytes]] = {path: [] for path in sizes}
    if blocks:
        with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1, len(blocks))) as threads:
            for (path, _), digest in zip(blocks, threads.map(_hash_block, *zip(*blocks, strict=True)), strict=True):
                found[path].append(digest)
    person = b"jdisagg file"
    return {
        path: hashlib.blake2b(
            sizes[path].to_bytes(8, "little") + b"".join(each), digest_size=DIGEST_BYTES, person=person
        ).digest()
        for path, each in found.items()
    }


def _hash_block(path: Path, start: int) -> bytes:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"jdisagg block")
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            left = BLOCK_BYTES
            while left and (data := file.read(left)):
                digest.update(data)
                left -= len(data)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    return digest.digest()


# Cache of digests between starts.


class DigestCache:
    """A cache of file digests by absolute path, in one JSON file of the cache folder."""

    def __init__(self, folder: Path | None) -> None:
        """Disables the cache if `folder` is None."""
        self._file = folder / CACHE_FILE if folder is not None else None

    def find(self, states: Mapping[Path, FileState]) -> dict[Path, bytes]:
        """Returns the digests of unchanged files; nothing if the cache cannot be read."""
        entries, found = self._read(), dict[Path, bytes]()
        for path, state in states.items():
            entry = entries.get(str(path.absolute()))
            if isinstance(entry, list) and tuple(entry[:-1]) == state and (digest := _read_digest(entry[-1])):
                found[path] = digest
        return found

    def keep(self, states: Mapping[Path, FileState], digests: Mapping[Path, bytes]) -> None:
        """Adds the digests of files that did not change just now, and drops those of deleted files. A failure is
        logged; the next start reads the files again."""
        if self._file is None:
            return
        settled_ns = time.time_ns() - SETTLED_NS
        files = {path: entry for path, entry in self._read().items() if os.path.exists(path)}
        for path, state in states.items():
            if max(state.mtime_ns, state.ctime_ns) < settled_ns:
                files[str(path.absolute())] = [*state, digests[path].hex()]
        temporary = ""
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile("w", dir=self._file.parent, delete=False, encoding="utf-8") as file:
                temporary = file.name
                json.dump({"version": CACHE_VERSION, "files": files}, file)
            os.replace(temporary, self._file)
        except (OSError, ValueError) as error:
            log.info("digests of model files are not kept for the next start: %s", error)
            with contextlib.suppress(OSError):
                os.unlink(temporary)

    def _read(self) -> dict[str, Any]:
        """Returns the cached entries by path: size, inode, mtime, ctime and the digest in hexadecimal."""
        try:
            stored = json.loads(self._file.read_text(encoding="utf-8")) if self._file is not None else {}
            files = stored["files"] if stored and stored["version"] == CACHE_VERSION else {}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return {}
        return files if isinstance(files, dict) else {}


def _read_digest(text: Any) -> bytes:
    """Returns the bytes of a cached digest; empty if it is damaged."""
    try:
        digest = bytes.fromhex(text)
    except (ValueError, TypeError):
        return b""
    return digest if len(digest) == DIGEST_BYTES else b""
