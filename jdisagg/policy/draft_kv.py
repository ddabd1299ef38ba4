"""Whether a draft model's KV goes where the model's does, or is made where tokens are drawn: by price.

Either way the draft reads each prompt once. What goes with the model's pages is found again with prefixes, and those
tokens are read no more; its bytes cross each time. That is the question of how fast a link must be for reuse to pay
(Mooncake: Qin et al., FAST 2025, equation 2), asked of the draft. Where guesses may never be taken the answer is
another: made where tokens are drawn it is made for guesses that are wanted, sent with the pages for every prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

from jdisagg.core.hardware import Chip
from jdisagg.core.layout.kv_layout import KVLayout
from jdisagg.core.model_config import ModelConfig

REPEATED = 1 / 3  # of prompts' tokens: Mooncake's conversations with room for ten million tokens (figure 9)
# Round estimates: nothing here learns what this load repeats, what these chunks reach, or what this link does.
REACHED = 0.4  # of a sheet's FLOP/s
LINK_BYTES_PER_S = 25e9  # a NIC of 200 Gbit/s
CPU_FLOPS_PER_S, CPU_BYTES_PER_S = 5e10, 2e9  # two cores, and loopback TCP


@dataclass(frozen=True, slots=True)
class DraftPrice:
    """Seconds a token of a prompt, in the mean: of sending the draft's KV, and of reading it again where it was not."""

    send_s: float
    reread_s: float

    @property
    def ships(self) -> bool:
        return self.send_s < self.reread_s


def price_of(draft: ModelConfig, pages: KVLayout, chip: Chip | None, *, prefixes: bool, always: bool) -> DraftPrice:
    """chip: the devices' sheet, None of CPUs; prefixes: whether they are found again; always: whether the draft guesses
    for whoever asks, not only where that is faster (`auto`), which may be nowhere."""
    flops_per_s, link = (REACHED * chip.flops_per_s, LINK_BYTES_PER_S) if chip else (CPU_FLOPS_PER_S, CPU_BYTES_PER_S)
    read_s = draft.prefill_flops(1.0) / flops_per_s
    return DraftPrice(pages.bytes_per_token / link, REPEATED * read_s if prefixes and always else 0.0)
