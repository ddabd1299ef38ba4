"""What a step may be expected to take on a chip, where its floor says what it must: rates are the shares of the data
sheet that kernels were measured to reach (`hardware.py`), and of collectives counts what nothing else hides.

`jdisagg aot` counts the collectives in the compiled program, and reads off its schedule what runs beside them.
"""

from __future__ import annotations

from dataclasses import dataclass

from jdisagg.core.hardware import Joined, Sent, Work
from jdisagg.sim.hardware import Hardware

ONE = Joined()


@dataclass(frozen=True, slots=True)
class Expected:
    """Seconds of one device, by what they go to."""

    matrices_s: float
    kv_s: float
    collectives_s: float  # in which nothing else runs

    @property
    def total_s(self) -> float:
        return self.matrices_s + self.kv_s + self.collectives_s


def expected(work: Work, chip: Hardware, weight_dtype: str, exposed_s: float) -> Expected:
    """weight_dtype: of matrices' products. exposed_s: of collectives, by the compiled program's schedule."""
    kv_s = work.kv_bytes / (chip.hbm_bytes_per_s * chip.decode_attention)
    return Expected(multiplying(work, chip, weight_dtype), kv_s, exposed_s)


def multiplying(work: Work, chip: Hardware, weight_dtype: str) -> float:
    """Seconds of products: of reading their matrices or of their FLOPs, whichever is more."""
    read_s = work.weight_bytes / (chip.hbm_bytes_per_s * chip.skinny)
    return max(read_s, work.flops / (chip.flops_of(weight_dtype) * chip.gemm))


def start_s(chip: Hardware, joined: Joined = ONE) -> float:
    """Of an all-reduce of a few bytes, there and back."""
    return 2 * joined.hops * chip.hop_s or chip.collective_s


def sending(chip: Hardware, sent: Sent, joined: Joined = ONE) -> float:
    """Seconds of the bytes."""
    inside_s = sent.inside / (chip.link_bytes_per_s * joined.links * chip.link)
    return inside_s + sent.between / (chip.nic_bytes_per_s * chip.link)
