"""Devices and links by name: data sheets, and the shares of them that measurements found.

The sheets of chips with a compile target are in `core.targets` alone. Bandwidths are one way, in bytes per second,
decimal. Efficiencies come from kernel tables measured with vLLM 0.14-0.19 (aiconfigurator's data, Apache-2.0): large
bf16 GEMM, skinny GEMM (share of HBM), causal prefill attention, GQA decode attention. TPUs and chips without such a
table take the H100's shares.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jdisagg.core.errors import ConfigError
from jdisagg.core.hardware import CHIPS
from jdisagg.core.model_config import ModelConfig
from jdisagg.model.hf_config import read_config
from jdisagg.sim.arithmetic import model


@dataclass(frozen=True, slots=True)
class ChipSpec:
    """The data sheet of one kind of device, its links and its price."""

    name: str
    flops: float  # bf16, dense, per second
    hbm_bytes: int
    hbm_bytes_per_s: float
    link_bytes_per_s: float  # to a neighbour of its node, one way
    nic_bytes_per_s: float  # to another node, one way, per device
    price_per_hour: float = 0.0  # USD; 0: not stated
    gemm: float = 0.78  # share of `flops`
    skinny: float = 0.83  # share of HBM bandwidth if weights are read for few rows
    prefill_attention: float = 0.67  # share of `flops`
    decode_attention: float = 0.86  # share of HBM
    link: float = 0.77  # share of a link that one stream gets
    collective_s: float = 15.5e-6  # an all-reduce of a few bytes
    hop_s: float = 0.0  # per link crossed, one way
    host_bytes_per_s: float = 25e9  # to its host's memory, one way, pinned: PCIe 4.0 x16
    disk_bytes_per_s: float = 3e9  # per device: one NVMe drive each
    platform: str = "gpu"
    narrow: tuple[tuple[str, float], ...] = ()  # dtypes with a faster product than bf16, and the factor

    @property
    def port_bytes_per_s(self) -> float:
        """Returns the bandwidth of one stream over a device's share of the NIC, one way."""
        return self.nic_bytes_per_s * self.link

    def flops_of(self, dtype: str) -> float:
        """Returns the FLOPs per second of products in `dtype`; those of bf16 if the chip has no product in it."""
        return self.flops * dict(self.narrow).get(dtype, 1.0)


TWICE = (("int8", 2.0), ("fp8", 2.0))
TORUS: dict[str, Any] = {"narrow": (("int8", 2.0),), "collective_s": 6e-6, "hop_s": 1e-6}  # 8 chips: 3 hops and back


def _chip(name: str, link_bytes_per_s: float, nic_bytes_per_s: float, *rest: Any, **named: Any) -> ChipSpec:
    """Returns a chip of `core.targets` with the numbers that its sheet lacks."""
    chip = CHIPS[name]
    sheet = (chip.flops_per_s, chip.memory_bytes, chip.memory_bytes_per_s)
    return ChipSpec(name, *sheet, link_bytes_per_s, nic_bytes_per_s, *rest, platform=chip.platform, **named)


_A100 = _chip("a100", 300e9, 25e9, 2.21, 0.91, 0.70, 0.55, 0.75, 0.76, 22.6e-6, narrow=(("int8", 2.0),))
_H100 = _chip("h100", 450e9, 50e9, 4.76, 0.78, 0.83, 0.67, 0.86, 0.77, 15.5e-6, 50e9, narrow=TWICE)
HARDWARE = {
    each.name: each
    for each in (
        _A100,
        _H100,
        _chip("h200", 450e9, 50e9, 0.0, 0.75, 0.78, 0.67, 0.78, 0.77, 16.0e-6, 50e9, narrow=TWICE),
        ChipSpec(
            "b200", 2250e12, 180 << 30, 7.7e12, 900e9, 100e9, host_bytes_per_s=50e9, narrow=(*TWICE, ("int4", 4.0))
        ),
        replace(_A100, name="a800", link_bytes_per_s=200e9, price_per_hour=0.0),
        replace(_H100, name="h800", link_bytes_per_s=200e9, price_per_hour=2.0),
        # A TPU's link is one of its ports: the sheets give a chip 1,600, 4,800 and 3,200 Gbit/s over 4, 6 and 4, so
        # those of v5p and v6e are equally fast. A hop takes about a microsecond ("How to Scale Your Model", part 3).
        _chip("v5e", 50e9, 3.1e9, 1.2, **TORUS),
        _chip("v5p", 100e9, 6.2e9, 4.2, **TORUS),
        _chip("v6e", 100e9, 6.2e9, 2.7, **TORUS),
        # 1,200 GB/s both ways over six ports, and 100 Gbit/s to other slices, of a chip (cloud.google.com/tpu/docs/
        # tpu7x): half of each is a device's. What crosses between a chip's two devices is counted as if over a port.
        _chip("v7x", 50e9, 6.25e9, **{**TORUS, "narrow": (("fp8", 2.0),)}),
        # One socket of 56 cores with AMX at 1.9 GHz and 8 channels of DDR5-4800; the shares are guesses, not measured.
        ChipSpec("xeon8480", 218e12, 512 << 30, 307e9, 48e9, 25e9, 2.0, 0.4, 0.7, 0.2, 0.7, 0.7, 20e-6, platform="cpu"),
    )
}


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """A link between two meshes, in bytes per second, one way, decimal; `measured` is for one stream, if known."""

    name: str
    bytes_per_s: float
    measured_bytes_per_s: float | None = None


LINKS = (
    LinkSpec("NVLink A100, one way", 300e9, 228e9),
    LinkSpec("NVLink H100, one way", 450e9, 348e9),
    LinkSpec("PCIe 5.0 x16, one way", 64e9, None),
    LinkSpec("8 x 400 Gbit/s RDMA", 400e9, 190e9),
    LinkSpec("4 x 200 Gbit/s RDMA", 100e9, 87e9),
    LinkSpec("400 Gbit/s (NDR)", 50e9, 35.9e9),
    LinkSpec("200 Gbit/s (HDR)", 25e9, None),
    LinkSpec("100 Gbit/s Ethernet", 12.5e9, None),
    LinkSpec("25 Gbit/s Ethernet", 3.125e9, None),
    LinkSpec("10 Gbit/s Ethernet", 1.25e9, None),
    LinkSpec("1 Gbit/s Ethernet", 0.125e9, None),
)


def hardware(name: str) -> ChipSpec:
    """Returns the hardware by name. Raises ConfigError with the known names."""
    if name not in HARDWARE:
        raise ConfigError(f"no hardware {name!r}; there are {', '.join(HARDWARE)}")
    return HARDWARE[name]


# The configuration of a model given by a name, a folder or nothing.

EMBEDDED = Path(__file__).parent.parent / "embedded"


def model_of(name: str) -> ModelConfig:
    """Returns the configuration for a name of `sim/arithmetic.py`, a Hugging Face folder, or "" (the embedded model).
    Raises ConfigError or CheckpointError."""
    folder = Path(name) if name else EMBEDDED
    return replace(read_config(folder), family=folder.name) if folder.is_dir() else model(name)
