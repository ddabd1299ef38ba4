"""What compilers are told beyond their defaults, with the reason; `python -m benchmarks.compiler_flags` measures each.

They go with each program of several devices, not by the environment, so that what is compiled ahead and what is
compiled at a start are the same. A compiler that does not know one any more is asked for the others alone.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.errors import JaxRuntimeError
from jax.sharding import SingleDeviceSharding

Option = str | bool | int

log = logging.getLogger(__name__)
# A CPU's compiler computes in f32 what is bf16 or fp8, and takes a write of some rows for that: it would convert the
# whole pool, and back. A step over a bf16 pool of 32 MiB takes 48 ms of CPU so, and 0.9 without these passes.
AS_STORED: dict[str, Option] = {"xla_disable_hlo_passes": "float-normalization-bf16,float-normalization-f8e4m3fn"}
TPUS = ("TPU v5", "TPU v6", "TPU7x")
GPUS = ("NVIDIA",)
WITHOUT_SPARSE_CORES = "TPU v5 lite"
SENT_BESIDE_BYTES = 64 << 10  # of a block of columns (`model/network.py`), at the least


@dataclass(frozen=True, slots=True)
class CompilerFlag:
    """For devices whose kind begins so."""

    name: str
    value: Option
    kinds: tuple[str, ...]
    reason: str
    but: tuple[str, ...] = ()  # nor for these of them
    beside: int | None = None  # its value in programs whose small sums have products beside them, where another
    alone: bool = False  # programs of one device have it too
    in_part: tuple[str, ...] = ()  # and for these in programs that span some devices of a slice, not all

    def concerns(self, kind: str, *, part: bool = False) -> bool:
        asked = kind.startswith(self.kinds + (self.in_part if part else ()))
        return asked and not kind.startswith(self.but or ("none",))


COMPILER_FLAGS = (
    CompilerFlag(
        "xla_jf_crs_combiner_threshold_in_bytes",
        0,
        TPUS,
        "sums of both halves of a chunk would be joined into one, which waits for both halves' products",
    ),
    CompilerFlag(
        "xla_tpu_enable_sparse_core_collective_offload_all_reduce",
        True,
        TPUS,
        "an all-reduce goes on beside products, sent and summed by the sparse cores",
        but=(WITHOUT_SPARSE_CORES,),
    ),
    CompilerFlag(
        "xla_tpu_sparse_core_all_reduce_offload_min_size_in_bytes",
        4 << 20,
        TPUS,
        "small sums stay where the products are, but for those in blocks of columns, which have products beside them",
        but=(WITHOUT_SPARSE_CORES,),
        beside=SENT_BESIDE_BYTES,
    ),
    *(
        CompilerFlag(
            f"xla_tpu_enable_sparse_core_collective_offload_{shape}all_gather",
            True,
            TPUS,
            "blocks of logits are gathered beside the next block's product, by the sparse cores",
            but=(WITHOUT_SPARSE_CORES,),
        )
        for shape in ("", "2d_", "3d_")  # all, and those whose devices are a plane or a cube
    ),
    # Sparse cores send nothing for a program that does not span its whole slice: there it is as on chips without.
    CompilerFlag(
        "xla_enable_async_all_reduce",
        True,
        (WITHOUT_SPARSE_CORES,),
        "an all-reduce has a start and an end of its own",
        in_part=TPUS,
    ),
    CompilerFlag(
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce",
        True,
        (WITHOUT_SPARSE_CORES,),
        "its steps are fused with the product that stands between its start and its end",
        in_part=TPUS,
    ),
    CompilerFlag(
        "xla_disable_hlo_passes",
        "rematerialization",
        GPUS,
        "a pool that kernels write in place is taken for two, and where memory seems short for both, steps compute"
        " again what is there",
        alone=True,
    ),
)


def options_for(device: Any, *, as_stored: bool, devices: int, beside: bool = False) -> dict[str, Option] | None:
    """Of programs for so many devices like this one, which is of this process or of a topology; None: nothing.
    as_stored: for those that move pages, as they are; beside: see `CompilerFlag`."""
    if device.platform == "cpu":
        return AS_STORED if as_stored else None
    part = devices < device.client.device_count()
    known = _known(device.device_kind, device.client.platform_version, part, device)
    told = [each for each in known if devices > 1 or each.alone]
    return {each.name: each.value if each.beside is None or not beside else each.beside for each in told} or None


@cache
def _known(kind: str, version: str, part: bool, device: Any) -> tuple[CompilerFlag, ...]:
    asked = [each for each in COMPILER_FLAGS if each.concerns(kind, part=part)]
    known = [each for each in asked if _accepted(each.name, each.value, device)]
    for each in asked:
        if each not in known:
            log.warning(
                "the compiler for %s (%s) has no flag %s=%s: it is left out", kind, version, each.name, each.value
            )
    return tuple(known)


def _accepted(name: str, value: Option, device: Any) -> bool:
    """Whether a program that does nothing compiles with it."""
    nothing = jax.ShapeDtypeStruct((), jnp.float32, sharding=SingleDeviceSharding(device))
    try:
        jax.jit(jnp.negative, compiler_options={name: value}).lower(nothing).compile()
    except (JaxRuntimeError, ValueError):
        return False
    return True


def forget() -> None:
    """Asks the compilers anew, where the flags are others."""
    _known.cache_clear()
