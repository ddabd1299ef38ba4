"""Accelerators one may compile for without having them: data from the makers' sheets, and how a target is written.

target = chip ":" sides, as v5e:2x4, v5p:2x2x4, v6e:4x4, v7x:2x2x1 (a slice of a TPU pod, in chips; of v7x each is two
devices) or h100:8, h100:2x8 (GPUs, or hosts by GPUs).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

from jdisagg.core.errors import MeshError

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Chip:
    """One device. Rates are the sheets' peaks: no program is faster, and a floor made of them is one."""

    name: str
    platform: str  # "tpu" or "gpu", as jax's devices call it
    memory_bytes: int  # what a program may take: libtpu keeps some of a TPU for itself
    memory_bytes_per_s: float
    flops_per_s: float  # dense bf16 products summed in f32
    dimensions: int  # sides of a target
    gpu: GpuSheet | None = None
    devices: int = 1  # of a chip, as jax counts them; the figures are of one
    compiled_as: str = ""  # libtpu's name for it, where it has another


@dataclass(frozen=True, slots=True)
class GpuSheet:
    """What the compiler asks of an NVIDIA GPU (the fields of XLA's GpuDeviceInfoProto that differ between them)."""

    description: str
    compute_capability: int  # major
    cores: int
    fpus_per_core: int
    shared_bytes_per_core: int
    shared_bytes_per_block: int  # the most a block may opt in to
    l2_bytes: int
    clock_ghz: float


_H100 = GpuSheet("NVIDIA H100 80GB HBM3", 9, 132, 128, 233_472, 232_448, 50 << 20, 1.98)
_H200 = GpuSheet("NVIDIA H200", 9, 132, 128, 233_472, 232_448, 50 << 20, 1.98)
_A100 = GpuSheet("NVIDIA A100-SXM4-80GB", 8, 108, 64, 167_936, 166_912, 40 << 20, 1.41)
# TPU: cloud.google.com/tpu/docs/{v5e,v5p,v6e,tpu7x}; memory as libtpu 0.0.42 says it in "exceeds available HBM".
# GPU: NVIDIA's data sheets of the SXM boards, without sparsity; memory as the driver counts it.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", "tpu", int(15.75 * GIB), 819e9, 197e12, 2),
        Chip("v5p", "tpu", int(95.74 * GIB), 2_765e9, 459e12, 3),
        Chip("v6e", "tpu", int(31.25 * GIB), 1_640e9, 918e12, 2),
        Chip("v7x", "tpu", int(94.75 * GIB), 3_690e9, 1_153.5e12, 3, devices=2, compiled_as="tpu7x"),
        Chip("a100", "gpu", 85_100_068_864, 2_039e9, 312e12, 2, _A100),
        Chip("h100", "gpu", 84_942_979_072, 3_352e9, 989.4e12, 2, _H100),
        Chip("h200", "gpu", 151_397_597_184, 4_800e9, 989.4e12, 2, _H200),
    )
}


# How jax calls a TPU, where that is not its name here.
_KINDS = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e", "TPU7x": "v7x"}


def chip_called(device_kind: str) -> Chip | None:
    """The chip that jax calls so; None where there is no sheet. Of a GPU, boards of other memory or form are others."""
    name = _KINDS.get(device_kind, device_kind.removeprefix("TPU "))
    found = (each for each in CHIPS.values() if each.gpu is not None and each.gpu.description == device_kind)
    return CHIPS.get(name) or next(found, None)


@dataclass(frozen=True, slots=True)
class Target:
    """`sides` multiply to the number of devices; those of a GPU are (hosts, GPUs of one)."""

    chip: Chip
    sides: tuple[int, ...]

    @staticmethod
    def parse(text: str) -> Target:
        """Raises MeshError saying what is wrong and what could be written."""
        match = re.fullmatch(r"(?P<chip>\w+):(?P<sides>[1-9]\d*(x[1-9]\d*)*)", text.strip().lower())
        if match is None:
            raise MeshError(f"cannot read target {text!r}; targets are written as v5e:2x4, v5p:2x2x4 or h100:8")
        chip = CHIPS.get(match["chip"])
        if chip is None:
            raise MeshError(f"unknown chip {match['chip']!r} in target {text!r}; chips are {', '.join(CHIPS)}")
        sides = tuple(int(side) for side in match["sides"].split("x"))
        if chip.gpu and len(sides) == 1:
            sides = (1, *sides)
        if len(sides) != chip.dimensions:
            raise MeshError(f"target {text!r} has {len(sides)} sides, {chip.name} has {chip.dimensions}")
        return Target(chip, sides)

    def __str__(self) -> str:
        shown = self.sides[1:] if self.chip.gpu and self.sides[0] == 1 else self.sides
        return f"{self.chip.name}:" + "x".join(map(str, shown))

    @property
    def num_devices(self) -> int:
        return prod(self.sides) * self.chip.devices

    def host_of(self, device: int) -> int:
        """As links see it: GPUs of a host are joined by NVLink, chips of a slice by ICI, whatever hosts have them."""
        return device // self.sides[1] if self.chip.gpu else 0
