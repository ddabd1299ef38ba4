"""What a step may be expected to take on a chip, where its floor says what it must: rates are the shares of the data
sheet that kernels were measured to reach (`hardware.py`), and collectives stand in nobody's shadow.

`jdisagg.aot` counts the collectives in the compiled program.
"""

from __future__ import annotations

from dataclasses import dataclass

from jdisagg.core.collectives import Sent
from jdisagg.core.roofline import Work
from jdisagg.sim.hardware import Hardware


@dataclass(frozen=True, slots=True)
class Expected:
    """Seconds of one device, by what they go to."""

    matrices_s: float
    kv_s: float
    collectives_s: float

    @property
    def total_s(self) -> float:
        return self.matrices_s + self.kv_s + self.collectives_s


def expected(work: Work, chip: Hardware, weight_dtype: str, collectives: int, sent: Sent) -> Expected:
    """weight_dtype: of matrices' products. collectives: how many, which send `sent` in all."""
    read_s = work.weight_bytes / (chip.hbm_bytes_per_s * chip.skinny)
    return Expected(
        max(read_s, work.flops / (chip.flops_of(weight_dtype) * chip.gemm)),
        work.kv_bytes / (chip.hbm_bytes_per_s * chip.decode_attention),
        collectives * chip.collective_s
        + sent.inside / (chip.link_bytes_per_s * chip.link)
        + sent.between / (chip.nic_bytes_per_s * chip.link),
    )
