"""Compiler options beyond the defaults, with reasons; `python -m benchmarks.compiler_flags` measures each.

They are set per program of several devices, not by the environment, so that programs compiled ahead and at start are
the same. An option that a compiler does not know is left out.
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
# The CPU compiler computes bf16 and fp8 in f32. It treats a write of some rows as computation and would convert the
# whole pool and back: a step over a bf16 pool of 32 MiB takes 48 ms of CPU, and 0.9 ms without these passes.
AS_STORED: dict[str, Option] = {"xla_disable_hlo_passes": "float-normalization-bf16,float-normalization-f8e4m3fn"}
TPUS = ("TPU v5", "TPU v6", "TPU7x")
GPUS = ("NVIDIA",)
WITHOUT_SPARSE_CORES = "TPU v5 lite"
SENT_BESIDE_BYTES = 64 << 10  # least bytes of a column block whose all-reduce overlaps (`model/network.py`)


@dataclass(frozen=True, slots=True)
class CompilerOption:
    """A compiler option for devices whose kind starts with one of `kinds`."""

    name: str
    value: Option
    kinds: tuple[str, ...]
    reason: str
    but: tuple[str, ...] = ()  # excluded prefixes among those kinds
    beside: int | None = None  # its value in programs that overlap small all-reduces with products, if different
    alone: bool = False  # also set for programs of one device
    in_part: tuple[str, ...] = ()  # further kinds, for programs on a part of a slice

    def concerns(self, kind: str, *, part: bool = False) -> bool:
        matches = kind.startswith(self.kinds + (self.in_part if part else ()))
        return matches and not kind.startswith(self.but or ("none",))


COMPILER_FLAGS = (
    CompilerOption(
        "xla_jf_crs_combiner_threshold_in_bytes",
        0,
        TPUS,
        "all-reduces of both halves of a chunk would be joined into one, which waits for both halves' products",
    ),
    CompilerOption(
        "xla_tpu_enable_sparse_core_collective_offload_all_reduce",
        True,
        TPUS,
        "an all-reduce goes on beside products, sent and summed by the sparse cores",
        but=(WITHOUT_SPARSE_CORES,),
    ),
    CompilerOption(
        "xla_tpu_sparse_core_all_reduce_offload_min_size_in_bytes",
        4 << 20,
        TPUS,
        "small sums stay where the products are, but for those in blocks of columns, which have products beside them",
        but=(WITHOUT_SPARSE_CORES,),
        beside=SENT_BESIDE_BYTES,
    ),
    *(
        CompilerOption(
            f"xla_tpu_enable_sparse_core_collective_offload_{shape}all_gather",
            True,
            TPUS,
            "blocks of logits are gathered beside the next block's product, by the sparse cores",
            but=(WITHOUT_SPARSE_CORES,),
        )
        for shape in ("", "2d_", "3d_")  # any shape, and devices in a plane or a cube
    ),
    # Sparse cores do not send for a program on a part of its slice; there the options of chips without them apply.
    CompilerOption(
        "xla_enable_async_all_reduce",
        True,
        (WITHOUT_SPARSE_CORES,),
        "an all-reduce has a start and an end of its own",
        in_part=TPUS,
    ),
    CompilerOption(
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce",
        True,
        (WITHOUT_SPARSE_CORES,),
        "its steps are fused with the product that stands between its start and its end",
        in_part=TPUS,
    ),
    CompilerOption(
        "xla_disable_hlo_passes",
        "rematerialization",
        GPUS,
        "a pool that kernels write in place is taken for two, and where memory seems short for both, steps compute"
        " again what is there",
        alone=True,
    ),
)


def options_for(device: Any, *, as_stored: bool, devices: int, beside: bool = False) -> dict[str, Option] | None:
    """Returns the options of programs on `devices` devices of this kind, attached or of a topology; None for no
    options. `as_stored`: the programs move pages without converting them. `beside`: see `CompilerOption`."""
    if device.platform == "cpu":
        return AS_STORED if as_stored else None
    part = devices < device.client.device_count()
    accepted = _known(device.device_kind, device.client.platform_version, part, device)
    chosen = [each for each in accepted if devices > 1 or each.alone]
    return {each.name: each.value if each.beside is None or not beside else each.beside for each in chosen} or None


@cache
def _known(kind: str, version: str, part: bool, device: Any) -> tuple[CompilerOption, ...]:
    candidates = [each for each in COMPILER_FLAGS if each.concerns(kind, part=part)]
    accepted = [each for each in candidates if _accepted(each.name, each.value, device)]
    for each in candidates:
        if each not in accepted:
            log.warning(
                "the compiler for %s (%s) has no flag %s=%s: it is left out", kind, version, each.name, each.value
            )
    return tuple(accepted)


def _accepted(name: str, value: Option, device: Any) -> bool:
    """Returns True if an empty program compiles with the option."""
    nothing = jax.ShapeDtypeStruct((), jnp.float32, sharding=SingleDeviceSharding(device))
    try:
        jax.jit(jnp.negative, compiler_options={name: value}).lower(nothing).compile()
    except (JaxRuntimeError, ValueError):
        return False
    return True


def forget() -> None:
    """Clears the cache of accepted options after the flags have changed."""
    _known.cache_clear()
