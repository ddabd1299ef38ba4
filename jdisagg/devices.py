"""The devices of a run, and its cache of compiled programs; without an accelerator it creates virtual CPU devices."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jdisagg import saved_programs
from jdisagg.core.errors import ConfigError, FlagError, MeshError
from jdisagg.core.hardware import Chip, Target, chip_called
from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.parallel.topology import machine_name

# The cache of compiled programs: a folder for this user, this machine and this jax.
#
# Programs of the folder are run without a check, so only a folder that its owner alone may write is used. A second
# process finds what the first one compiled; a truncated file is compiled again.

AUTO, OFF = "auto", "off"
MOST_BYTES = 1 << 30  # of all programs together, of every machine and version: the embedded model's have 1.2 MB
SWEPT = "swept"  # a file whose time is that of the last sweep: later entries may be truncated
CLOCKS_OFF_S = 60.0  # clock differences of machines that share a home folder
OTHERS_MAY_WRITE = 0o022
ZLIB = b"\x78"  # first byte of an entry if jax has no better compression than zlib

log = logging.getLogger(__name__)


def use(setting: str) -> Path | None:
    """Makes jax use the folder of --compile_cache_dir for programs; returns it, or None if there is none.

    "auto" is jax's own setting (JAX_COMPILATION_CACHE_DIR), else the user's cache folder; if that cannot be used,
    every start compiles again, with a warning. A folder of programs compiled ahead is used unchanged
    (`saved_programs.py`). Raises ConfigError for an explicit folder that cannot be used.
    """
    jax_folder = jax.config.values.get("jax_compilation_cache_dir")
    folder = (
        Path(jax_folder) if setting == AUTO and jax_folder else None if setting in ("", OFF) else _cache_folder(setting)
    )
    keep_in(folder)
    return folder


def keep_in(folder: Path | None) -> None:
    """Makes jax store and find every program in `folder`; None: nowhere."""
    jax.config.update("jax_enable_compilation_cache", folder is not None)
    if folder is not None:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _cache_folder(setting: str) -> Path | None:
    try:
        if setting == AUTO:
            return _prepared(user_folder(os.environ) / "compiled", shared=False)
        folder, _ = saved_programs.folder_of(setting)
        if saved_programs.fits(setting):
            _refuse_strangers(folder, shared=True)
            return folder
        return _prepared(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: the home folder is unknown
        why = (error.strerror if isinstance(error, OSError) else None) or error
        if setting != AUTO:
            raise ConfigError(f"--compile_cache_dir={setting}: {why}") from error
        log.warning("compiled programs are not kept for the next start: %s", why)
        return None


def user_folder(environment: Mapping[str, str]) -> Path:
    """Returns `$XDG_CACHE_HOME/jdisagg`, or the default under the home folder. Raises RuntimeError if there is none."""
    cache_home = environment.get("XDG_CACHE_HOME", "")
    caches = Path(cache_home) if Path(cache_home).is_absolute() else Path("~/.cache").expanduser()
    return caches / "jdisagg"


def _prepared(root: Path, *, shared: bool = True) -> Path:
    """Prepares the folder of this machine's programs under `root`: writable and without truncated entries."""
    folder = root / machine_name()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _refuse_strangers(folder, shared=shared)
    probe = folder / f"probe-{os.getpid()}"
    probe.touch()
    probe.unlink()
    sweep(root, MOST_BYTES)
    return folder


def _refuse_strangers(folder: Path, *, shared: bool) -> None:
    status = folder.stat()
    writable = status.st_mode & (0o002 if shared else OTHERS_MAY_WRITE)
    if status.st_uid != os.getuid() or writable:
        owner = f"of user {status.st_uid}, mode {status.st_mode & 0o777:o}"
        raise PermissionError(None, f"others may write programs into {folder} ({owner}), which would be run here")


def sweep(root: Path, most_bytes: int) -> None:
    """Removes truncated entries, and the oldest ones beyond `most_bytes`. Another process may do so at the same time.
    Only entries written since the last sweep are read."""
    marker, kept_bytes = root / SWEPT, 0
    before_s = marker.stat().st_mtime if marker.exists() else 0.0
    entries = _entries(root)
    marker.touch()  # entries written during this sweep are read by the next one
    for written_s, size, path in entries:
        kept_bytes += size
        if kept_bytes > most_bytes or (written_s >= before_s - CLOCKS_OFF_S and not _is_whole(path)):
            path.unlink(missing_ok=True)


def _entries(root: Path) -> list[tuple[float, int, Path]]:
    """Returns (time written, bytes, file) of each entry, newest first."""
    files = []
    for path in root.rglob("*-cache"):
        try:
            entry = path.stat()
        except FileNotFoundError:
            continue
        files.append((entry.st_mtime, entry.st_size, path))
    return sorted(files, reverse=True)


def _is_whole(path: Path) -> bool:
    """Returns True if the entry can be read to its end; jax warns of a truncated one at every start and keeps it."""
    try:
        entry = path.read_bytes()
        return bool(entry) and (not entry.startswith(ZLIB) or bool(zlib.decompress(entry)))
    except (OSError, zlib.error):
        return False


_PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}
_DEVICE_FILES = ("accel*", "vfio/[0-9]*", "nvidia*", "dxg", "kfd")  # TPU (two kinds of driver), NVIDIA, WSL, AMD
GPU_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # share of a GPU's memory that jax takes, as in the run itself
MOST_VIRTUAL = 256  # CPU devices; each has its own threads


def prepare(platform: str, num_devices: int, compile_cache_dir: str = "off") -> list[Any]:
    """Returns the first `num_devices` devices of `platform` ("auto": the best there is).

    Call it before any other use of jax.

    On the CPU it creates the missing virtual devices, and sets the client's thread pool to twice the devices. With
    fewer threads, collectives of several meshes wait for each other's threads until the client aborts. With more,
    idle threads search for work (9 % of a decode step's samples with 32 threads on 2 cores). `compile_cache_dir` is
    as in --compile_cache_dir. Raises MeshError with both numbers if there are too few.
    """
    configure(platform, num_devices, compile_cache_dir)
    devices = at_hand(platform)
    if len(devices) < num_devices:
        raise MeshError(
            f"the mesh needs devices 0 to {num_devices - 1}, this machine has {len(devices)} ({devices[0].platform})"
        )
    return devices[:num_devices]


def prepare_mesh(mesh: MeshSpec, platform: str, compile_cache_dir: str = "off") -> list[Any]:
    """Returns the devices of the mesh's workers, in its order; like `prepare`, also if pools name platforms. Raises
    MeshError with the numbers if one platform has too few."""
    if not mesh.platforms:
        return prepare(platform, mesh.num_devices, compile_cache_dir)
    if platform != "auto":
        raise MeshError(f"--platform={platform} and --mesh={mesh}, which names its own: leave --platform out")
    wanted = {device: place.platform for place in mesh.workers() for device in place.device_ids}
    _configure_platforms(mesh, Counter(wanted.values()), compile_cache_dir)
    remaining = {name: iter(_devices_of(name)) for name in mesh.platforms}
    return [next(remaining[wanted[device]]) for device in sorted(wanted)]


def _configure_platforms(mesh: MeshSpec, wanted: Mapping[str, int], compile_cache_dir: str) -> None:
    accelerators = [name for name in mesh.platforms if name != "cpu" and accelerator_at_hand()]
    configure("auto", wanted.get("cpu", 1), compile_cache_dir)
    jax.config.update("jax_platforms", ",".join([*(_PLATFORMS[name] for name in accelerators), "cpu"]))
    counts = {name: len(_devices_of(name)) for name in ("cpu", *accelerators)}
    for name, number in wanted.items():
        if counts.get(name, 0) < number:
            names_found = ", ".join(f"{count} {each}" for each, count in counts.items())
            raise MeshError(f"--mesh={mesh} stands on {number} {name} devices, and this machine has {names_found}")


def _devices_of(platform: str) -> list[Any]:
    """Returns the devices of a platform; none if there are none, or no plugin for them."""
    try:
        return jax.devices(_PLATFORMS[platform])
    except (RuntimeError, AssertionError):
        return []


def first_of_most(devices: Sequence[Any]) -> Any:
    """Returns the first accelerator of a mesh if it has one, else its first device."""
    return next((each for each in devices if each.platform != "cpu"), devices[0])


def configure(platform: str, num_devices: int, compile_cache_dir: str) -> None:
    """Configures jax for `prepare`, without looking for devices yet."""
    virtual = min(num_devices, MOST_VIRTUAL)
    os.environ.setdefault("PJRT_NPROC", str(max(os.cpu_count() or 1, 2 * virtual)))
    if platform == "auto" and not jax.config.values.get("jax_platforms") and not accelerator_at_hand():
        platform = "cpu"
    if platform != "auto":
        jax.config.update("jax_platforms", _PLATFORMS[platform])
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # a backend has started already; its devices are used
            jax.config.update("jax_num_cpu_devices", virtual)
    use(compile_cache_dir)


def at_hand(platform: str) -> list[Any]:
    """Returns all devices, of all processes if there are several. Raises MeshError if there are none."""
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # AssertionError: no plugin for the platform is installed
        why = str(error) or "this jax has no plugin for them"
        raise MeshError(f"--platform={platform}: no such devices here ({why})") from error


def accelerator_at_hand() -> bool:
    """Returns True if a driver shows a device. Without one, libtpu and the CUDA plugin would search for seconds and
    warn. They may be installed only to compile (`jdisagg aot`). On systems other than Linux jax searches itself."""
    return sys.platform != "linux" or any(next(Path("/dev").glob(name), None) for name in _DEVICE_FILES)


def memory_bytes(device: Any) -> int | None:
    """Returns the memory of one accelerator in bytes; None if the runtime does not say (CPU)."""
    stats = device.memory_stats()
    return stats.get("bytes_limit") if stats else None


def chip_of(device: Any) -> Chip | None:
    """Returns the chip's data sheet, if there is one."""
    return chip_called(device.device_kind)


def usable_bytes(target: Target) -> int:
    """Returns the memory of one device that jax gets in the run itself."""
    if target.chip.gpu is None:
        return target.chip.memory_bytes
    try:
        return int(target.chip.memory_bytes * float(os.environ.get(GPU_SHARE, "0.75")))
    except ValueError as error:
        raise ConfigError(f"{GPU_SHARE}={os.environ[GPU_SHARE]}: {error}") from error


def imagined(platform: str, target: str, needs_memory: bool) -> tuple[str, int | None, Chip | None]:
    """Returns (platform, bytes of one device, its data sheet) of a run that touches no device. They are those of
    `target` (as h100:8), or what is known without it. Raises FlagError if sizes depend on an unknown memory."""
    jax.config.update("jax_platforms", "cpu")
    if target:
        chip = Target.parse(target)
        if platform not in ("auto", chip.chip.platform):
            raise FlagError(f"--platform={platform} and --target={target}, which is a {chip.chip.platform}")
        return chip.chip.platform, usable_bytes(chip), chip.chip
    if platform == "cpu" or (platform == "auto" and not accelerator_at_hand()):
        return "cpu", None, None
    if needs_memory or platform == "auto":
        raise FlagError("--dry_run touches no device: say whose memory there is by --target, as h100:8 or v5p:2x2x2")
    return platform, None, None
