"""What things take in virtual time: seconds for a plan, a transfer, a message."""

from __future__ import annotations

from dataclasses import dataclass

from jdisagg.core.steps import KVTransfer, StepPlan


@dataclass(frozen=True, slots=True)
class Costs:
    """Straight lines through a fixed cost; seconds."""

    prefill_s: float = 2e-3
    prefill_token_s: float = 2e-5
    decode_s: float = 1e-3
    decode_slot_s: float = 1e-4
    ship_s: float = 5e-4
    ship_token_s: float = 1e-6
    message_s: float = 1e-5

    def of_step(self, plan: StepPlan) -> float:
        """A mixed step has the fixed cost of its chunks alone: its rows ride."""
        rows_s = self.decode_slot_s * len(plan.decode.active) if plan.decode else 0.0
        if plan.prefill is None:
            return self.decode_s + rows_s
        return self.prefill_s + self.prefill_token_s * plan.prefill.bucket_tokens + rows_s

    def of_transfer(self, transfer: KVTransfer, num_layers: int) -> float:
        """Of a part's own layers, of the `num_layers` that a whole token has."""
        first, stop = transfer.layers or (0, num_layers)
        return self.ship_s + self.ship_token_s * transfer.num_tokens * (stop - first) / num_layers
