"""The devices of a run. On a machine without an accelerator they are virtual CPU devices, made here."""

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

# Where compiled programs are kept between starts: a folder of this machine, this jax and nobody else's.
#
# Programs of the folder are run as they are, so only one that its owner alone may write is trusted. A second
# process finds what the first one compiled; a file that was cut off is compiled again.

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


_PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}
_DEVICE_FILES = ("accel*", "vfio/[0-9]*", "nvidia*", "dxg", "kfd")  # TPU (two kinds of driver), NVIDIA, WSL, AMD
GPU_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # of a GPU's memory that jax takes, as in the run itself
MOST_VIRTUAL = 256  # CPU devices; each has threads of its own


def prepare(platform: str, num_devices: int, compile_cache_dir: str = "off") -> list[Any]:
    """The first `num_devices` devices of `platform` ("auto": the best there is); call before any other use of jax.

    On the CPU it makes the virtual devices that are missing, and widens the client's thread pool to twice the devices:
    with fewer threads, collectives of several meshes wait for each other's threads until the client aborts (with more,
    idle threads look for work that is not there: 9 % of a decode step's samples with 32 threads on 2 cores).
    `compile_cache_dir` is as in --compile_cache_dir. Raises MeshError naming both numbers where there are too few.
    """
    configure(platform, num_devices, compile_cache_dir)
    devices = at_hand(platform)
    if len(devices) < num_devices:
        raise MeshError(
            f"the mesh needs devices 0 to {num_devices - 1}, this machine has {len(devices)} ({devices[0].platform})"
        )
    return devices[:num_devices]


def prepare_mesh(mesh: MeshSpec, platform: str, compile_cache_dir: str = "off") -> list[Any]:
    """The devices that the mesh's workers stand on, in its order; as `prepare`, also where pools name platforms.

    Raises MeshError where there are too few of one, with what there is.
    """
    if not mesh.platforms:
        return prepare(platform, mesh.num_devices, compile_cache_dir)
    if platform != "auto":
        raise MeshError(f"--platform={platform} and --mesh={mesh}, which names its own: leave --platform out")
    wanted = {device: place.platform for place in mesh.workers() for device in place.device_ids}
    _configure_unlike(mesh, Counter(wanted.values()), compile_cache_dir)
    left = {name: iter(_devices_of(name)) for name in mesh.platforms}
    return [next(left[wanted[device]]) for device in sorted(wanted)]


def _configure_unlike(mesh: MeshSpec, wanted: Mapping[str, int], compile_cache_dir: str) -> None:
    accelerators = [name for name in mesh.platforms if name != "cpu" and accelerator_at_hand()]
    configure("auto", wanted.get("cpu", 1), compile_cache_dir)
    jax.config.update("jax_platforms", ",".join([*(_PLATFORMS[name] for name in accelerators), "cpu"]))
    there = {name: len(_devices_of(name)) for name in ("cpu", *accelerators)}
    for name, number in wanted.items():
        if there.get(name, 0) < number:
            found = ", ".join(f"{count} {each}" for each, count in there.items())
            raise MeshError(f"--mesh={mesh} stands on {number} {name} devices, and this machine has {found}")


def _devices_of(platform: str) -> list[Any]:
    """None where there is none, or no plugin for them."""
    try:
        return jax.devices(_PLATFORMS[platform])
    except (RuntimeError, AssertionError):
        return []


def first_of_most(devices: Sequence[Any]) -> Any:
    """The first accelerator of a mesh, where it has any, else its first device."""
    return next((each for each in devices if each.platform != "cpu"), devices[0])


def configure(platform: str, num_devices: int, compile_cache_dir: str) -> None:
    """Tells jax what to find, as `prepare`; it looks for nothing yet."""
    virtual = min(num_devices, MOST_VIRTUAL)
    os.environ.setdefault("PJRT_NPROC", str(max(os.cpu_count() or 1, 2 * virtual)))
    if platform == "auto" and not jax.config.values.get("jax_platforms") and not accelerator_at_hand():
        platform = "cpu"
    if platform != "auto":
        jax.config.update("jax_platforms", _PLATFORMS[platform])
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # a backend is up already: then its devices are what there is
            jax.config.update("jax_num_cpu_devices", virtual)
    use(compile_cache_dir)


def at_hand(platform: str) -> list[Any]:
    """All devices, of all processes of the world where there are several. Raises MeshError where there are none."""
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter where no plugin for the platform is installed
        why = str(error) or "this jax has no plugin for them"
        raise MeshError(f"--platform={platform}: no such devices here ({why})") from error


def accelerator_at_hand() -> bool:
    """Whether a driver shows a device: where none does, libtpu and the CUDA plugin would search for seconds and warn.

    They may be installed only to compile (`jdisagg aot`). On systems other than Linux jax is left to look for itself.
    """
    return sys.platform != "linux" or any(next(Path("/dev").glob(name), None) for name in _DEVICE_FILES)


def memory_bytes(device: Any) -> int | None:
    """Memory of one accelerator in bytes; None where the runtime does not say (CPU)."""
    stats = device.memory_stats()
    return stats.get("bytes_limit") if stats else None


def chip_of(device: Any) -> Chip | None:
    """Its data sheet, where there is one."""
    return chip_called(device.device_kind)


def usable_bytes(target: Target) -> int:
    """Of one device: what jax is given of it in the run itself."""
    if target.chip.gpu is None:
        return target.chip.memory_bytes
    try:
        return int(target.chip.memory_bytes * float(os.environ.get(GPU_SHARE, "0.75")))
    except ValueError as error:
        raise ConfigError(f"{GPU_SHARE}={os.environ[GPU_SHARE]}: {error}") from error


def imagined(platform: str, target: str, needs_memory: bool) -> tuple[str, int | None, Chip | None]:
    """(platform, bytes of one device, its data sheet) of a run that touches none: of `target` (as h100:8), or what is
    known without it.

    Raises FlagError where the memory decides something and nobody says it.
    """
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
