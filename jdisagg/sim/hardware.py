"""What devices and links can do, by name: data sheets, and the shares of them that measurements found.

Bandwidths are one way, bytes a second, decimal. Efficiencies were read from kernel tables measured with vLLM 0.14-0.19
(aiconfigurator's data, Apache-2.0): large bf16 GEMM, skinny GEMM (share of HBM), causal prefill attention, GQA decode
attention; TPUs have no such table yet and take the H100's shares.
"""

from __future__ import annotations

from dataclasses import dataclass

from jdisagg.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device of a kind, its neighbours, and its price."""

    name: str
    flops: float  # bf16, dense, a second
    hbm_bytes: int
    hbm_bytes_per_s: float
    link_bytes_per_s: float  # to a neighbour of its node, one way
    nic_bytes_per_s: float  # to another node, one way, a device's share
    price_per_hour: float = 0.0  # USD; 0: not stated
    gemm: float = 0.78  # share of `flops`
    skinny: float = 0.83  # share of HBM when weights are read for few rows
    prefill_attention: float = 0.67  # share of `flops`
    decode_attention: float = 0.86  # share of HBM
    link: float = 0.77  # share of a link one stream gets
    collective_s: float = 15.5e-6  # of an all-reduce of a few bytes


HARDWARE = {
    each.name: each
    for each in (
        Hardware("a100", 312e12, 80 << 30, 2.039e12, 300e9, 25e9, 2.21, 0.91, 0.70, 0.55, 0.75, 0.76, 22.6e-6),
        Hardware("h100", 989e12, 80 << 30, 3.35e12, 450e9, 50e9, 4.76, 0.78, 0.83, 0.67, 0.86, 0.77, 15.5e-6),
        Hardware("h200", 989e12, 141 << 30, 4.8e12, 450e9, 50e9, 0.0, 0.75, 0.78, 0.67, 0.78, 0.77, 16.0e-6),
        Hardware("a800", 312e12, 80 << 30, 2.039e12, 200e9, 25e9),
        Hardware("h800", 989e12, 80 << 30, 3.35e12, 200e9, 50e9, 2.0),
        Hardware("v5e", 197e12, 16 << 30, 0.819e12, 50e9, 3.1e9, 1.2),
        Hardware("v5p", 459e12, 95 << 30, 2.765e12, 100e9, 6.2e9, 4.2),
        Hardware("v6e", 918e12, 32 << 30, 1.64e12, 100e9, 6.2e9, 2.7),
    )
}


@dataclass(frozen=True, slots=True)
class Link:
    """A way between two meshes. Bytes a second, one way, decimal; `measured` is one stream's, where one was found."""

    name: str
    bytes_per_s: float
    measured_bytes_per_s: float | None = None


LINKS = (
    Link("NVLink A100, one way", 300e9, 228e9),
    Link("NVLink H100, one way", 450e9, 348e9),
    Link("PCIe 5.0 x16, one way", 64e9, None),
    Link("8 x 400 Gbit/s RDMA", 400e9, 190e9),
    Link("4 x 200 Gbit/s RDMA", 100e9, 87e9),
    Link("400 Gbit/s (NDR)", 50e9, 35.9e9),
    Link("200 Gbit/s (HDR)", 25e9, None),
    Link("100 Gbit/s Ethernet", 12.5e9, None),
    Link("25 Gbit/s Ethernet", 3.125e9, None),
    Link("10 Gbit/s Ethernet", 1.25e9, None),
    Link("1 Gbit/s Ethernet", 0.125e9, None),
)


def hardware(name: str) -> Hardware:
    """Raises ConfigError naming those there are."""
    if name not in HARDWARE:
        raise ConfigError(f"no hardware {name!r}; there are {', '.join(HARDWARE)}")
    return HARDWARE[name]
