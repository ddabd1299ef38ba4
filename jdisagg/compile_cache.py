"""Where compiled programs are kept between starts: a folder of this machine, this jax and nobody else's.

Programs of the folder are run as they are, so only one that its owner alone may write is trusted. A second process
finds what the first one compiled; a file that was cut off is compiled again.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Mapping
from pathlib import Path

import jax

from jdisagg import saved_programs
from jdisagg.core.errors import ConfigError
from jdisagg.parallel.machine_name import machine_name

AUTO, OFF = "auto", "off"
MOST_BYTES = 1 << 30  # of all programs together, of every machine and version: the embedded model's have 1.2 MB
SWEPT = "swept"  # a file whose time is that of the last sweep: who wrote an entry since may have died in it
CLOCKS_OFF_S = 60.0  # of machines that share a home folder
OTHERS_MAY_WRITE = 0o022
ZLIB = b"\x78"  # what an entry begins with, where jax has nothing better than zlib

log = logging.getLogger(__name__)


def use(setting: str) -> Path | None:
    """Makes jax keep and find programs in the folder of --compile_cache_dir; returns it, None where there is none.

    "auto" is what jax was told (JAX_COMPILATION_CACHE_DIR), else the user's cache folder; where that cannot be used
    every start compiles anew, with a warning. A folder of programs made ahead is used as it is (`saved_programs.py`).
    Raises ConfigError for a folder that was asked for and cannot be used.
    """
    told = jax.config.values.get("jax_compilation_cache_dir")
    folder = Path(told) if setting == AUTO and told else None if setting in ("", OFF) else _found(setting)
    keep_in(folder)
    return folder


def keep_in(folder: Path | None) -> None:
    """Makes jax keep and find every program there; None: nowhere."""
    jax.config.update("jax_enable_compilation_cache", folder is not None)
    if folder is not None:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _found(setting: str) -> Path | None:
    try:
        if setting == AUTO:
            return _prepared(user_folder(os.environ) / "compiled", shared=False)
        folder, _ = saved_programs.folder_of(setting)
        if saved_programs.fits(setting):
            _refuse_strangers(folder, shared=True)
            return folder
        return _prepared(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: nobody's home folder is known
        why = (error.strerror if isinstance(error, OSError) else None) or error
        if setting != AUTO:
            raise ConfigError(f"--compile_cache_dir={setting}: {why}") from error
        log.warning("compiled programs are not kept for the next start: %s", why)
        return None


def user_folder(environment: Mapping[str, str]) -> Path:
    """`$XDG_CACHE_HOME/jdisagg`, or the like under the home folder. Raises RuntimeError where there is none."""
    given = environment.get("XDG_CACHE_HOME", "")
    caches = Path(given) if Path(given).is_absolute() else Path("~/.cache").expanduser()
    return caches / "jdisagg"


def _prepared(root: Path, *, shared: bool = True) -> Path:
    """The folder of this machine's programs under `root`: it is there, can be written, and holds no half entries."""
    folder = root / machine_name()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _refuse_strangers(folder, shared=shared)
    probe = folder / f"probe-{os.getpid()}"
    probe.touch()
    probe.unlink()
    sweep(root, MOST_BYTES)
    return folder


def _refuse_strangers(folder: Path, *, shared: bool) -> None:
    found = folder.stat()
    writable = found.st_mode & (0o002 if shared else OTHERS_MAY_WRITE)
    if found.st_uid != os.getuid() or writable:
        whose = f"of user {found.st_uid}, mode {found.st_mode & 0o777:o}"
        raise PermissionError(None, f"others may write programs into {folder} ({whose}), which would be run here")


def sweep(root: Path, most_bytes: int) -> None:
    """Removes entries that were cut off, and the oldest beyond `most_bytes`. Another process may do so as well.

    Only what was written since the last sweep is read.
    """
    swept, held = root / SWEPT, 0
    before_s = swept.stat().st_mtime if swept.exists() else 0.0
    entries = _entries(root)
    swept.touch()  # what is written while we read is read the next time
    for written_s, size, path in entries:
        held += size
        if held > most_bytes or (written_s >= before_s - CLOCKS_OFF_S and not _is_whole(path)):
            path.unlink(missing_ok=True)


def _entries(root: Path) -> list[tuple[float, int, Path]]:
    """(when it was written, bytes, file), the newest first."""
    found = []
    for path in root.rglob("*-cache"):
        try:
            entry = path.stat()
        except FileNotFoundError:
            continue
        found.append((entry.st_mtime, entry.st_size, path))
    return sorted(found, reverse=True)


def _is_whole(path: Path) -> bool:
    """Whether an entry can be read to its end; jax would warn of one that cannot at every start, and never mend it."""
    try:
        entry = path.read_bytes()
        return bool(entry) and (not entry.startswith(ZLIB) or bool(zlib.decompress(entry)))
    except (OSError, zlib.error):
        return False
