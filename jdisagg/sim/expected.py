"""Expected seconds of a step on a chip, beside its lower bound.

Rates are the shares of the data sheet that kernels were measured to reach (`hardware.py`). Of collectives, only the
time that no other work hides counts. `jdisagg aot` counts the collectives in the compiled program, and reads off its
schedule what runs beside them.
"""

from __future__ import annotations

from dataclasses import dataclass

from jdisagg.core.hardware import Joined, Sent, Work
from jdisagg.sim.hardware import ChipSpec

ONE = Joined()


@dataclass(frozen=True, slots=True)
class ExpectedTime:
    """Expected seconds of one device by kind of work."""

    matrices_s: float
    kv_s: float
    collectives_s: float  # in which nothing else runs

    @property
    def total_s(self) -> float:
        return self.matrices_s + self.kv_s + self.collectives_s


def expected(work: Work, chip: ChipSpec, weight_dtype: str, exposed_s: float) -> ExpectedTime:
    """Returns the expected seconds of the work. `weight_dtype`: dtype of the matrix products. `exposed_s`: exposed
    collective time of the compiled program's schedule."""
    kv_s = work.kv_bytes / (chip.hbm_bytes_per_s * chip.decode_attention)
    return ExpectedTime(multiplying(work, chip, weight_dtype), kv_s, exposed_s)


def multiplying(work: Work, chip: ChipSpec, weight_dtype: str) -> float:
    """Returns the seconds of matrix products: the longer of reading the matrices and of their FLOPs."""
    read_s = work.weight_bytes / (chip.hbm_bytes_per_s * chip.skinny)
    return max(read_s, work.flops / (chip.flops_of(weight_dtype) * chip.gemm))


def start_s(chip: ChipSpec, joined: Joined = ONE) -> float:
    """Returns the seconds of an all-reduce of a few bytes, there and back."""
    return 2 * joined.hops * chip.hop_s or chip.collective_s


def sending(chip: ChipSpec, sent: Sent, joined: Joined = ONE) -> float:
    """Returns the seconds of sending the bytes."""
    inside_s = sent.inside / (chip.link_bytes_per_s * joined.links * chip.link)
    return inside_s + sent.between / (chip.nic_bytes_per_s * chip.link)
