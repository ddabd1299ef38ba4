"""What things take in virtual time: seconds for a plan, a transfer, a message."""

from __future__ import annotations

from dataclasses import dataclass

from jdisagg.core.plans import DecodePlan, KVTransfer, PrefillPlan


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

    def of_plan(self, plan: PrefillPlan | DecodePlan) -> float:
        if isinstance(plan, PrefillPlan):
            return self.prefill_s + self.prefill_token_s * plan.bucket_tokens
        return self.decode_s + self.decode_slot_s * len(plan.active)

    def of_transfer(self, transfer: KVTransfer, num_layers: int) -> float:
        """Of a part's own layers, of the `num_layers` that a whole token has."""
        first, stop = transfer.layers or (0, num_layers)
        return self.ship_s + self.ship_token_s * transfer.num_tokens * (stop - first) / num_layers
