"""What a ring's dispatch takes, by the arithmetic of its program: ticks, and at each what crosses between devices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from jdisagg.core.collectives import Collective, Sent
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.stages import ring_cut
from jdisagg.core.steps import DecodeRows, KVTransfer, PrefillChunks
from jdisagg.sim.cost_models import Contexts, Roofline, Times

LOGIT_BYTES = 4  # they are gathered in float32


@dataclass(frozen=True, slots=True)
class RingRoofline:
    """A ring of `pp` stages whose devices each do what the roofline of one of `stages`' says.

    A dispatch of n turns is n * pp + pp - 1 ticks. At each every stage steps one of pp microbatches through the layers
    at its places, padding among them, and the head is cut over all shards. Four collectives a tick: the sum of the
    embedding's rows and that of the activations that leave, the gather of the logits, the hop to the next stage. What
    goes between hosts goes over the NICs. The host is paid once a dispatch.
    """

    stages: Roofline
    pp: int
    host_devices: int = 0  # that are joined by fast links; 0: all

    def prefill_s(self, plan: PrefillChunks) -> float:
        raise AssertionError("a ring decodes and does nothing else")

    def decode_s(self, plan: DecodeRows, context_tokens: int) -> float:
        """context_tokens: when the last turn of the dispatch is over."""
        return self._dispatch_s(plan, context_tokens)

    def steps_s(self, plan: DecodeRows, context_tokens: Contexts) -> Times:
        return self._dispatch_s(plan, context_tokens)

    def transfer_bytes(self, transfer: KVTransfer) -> float:
        return self.stages.transfer_bytes(transfer)

    def _dispatch_s(self, plan: DecodeRows, context_tokens: Any) -> Any:
        """Adds and multiplies alone, so that the same goes for an array."""
        active, turns = len(plan.active), plan.num_turns
        read = context_tokens - (plan.most_tokens - active) / 2  # at the mean turn
        ticks, rows = turns * self.pp + self.pp - 1, -(-active // self.pp)
        microbatch = DecodeRows(0, tuple(range(rows)), plan.table_pages)
        through_s = self.stages.decode_s(microbatch, read / self.pp) - self.stages.host_s
        padding = _places(self.stages.model.config, self.pp) * self.pp / self.stages.model.config.num_layers
        return self.stages.host_s + ticks * (through_s * padding / self.pp + self.links_s(rows))

    def links_s(self, rows: int) -> float:
        """Of a tick with so many rows a microbatch."""
        chip = self.stages.chip
        found = [each.sent(self._hosts) for each in self.collectives(rows)]
        sent = sum(found, Sent())
        fixed_s = len(found) * chip.collective_s
        return (
            fixed_s
            + sent.inside / (chip.link_bytes_per_s * chip.link)
            + sent.between / (chip.nic_bytes_per_s * chip.link)
        )

    def collectives(self, rows: int) -> tuple[Collective, ...]:
        """Of a tick, those that tensor parallelism has anyhow left out."""
        model, pp, tp = self.stages.model, self.pp, self.stages.tp
        row_bytes = round(model.row_bytes(rows))
        hops = tuple((place, (place + tp) % (pp * tp)) for place in range(pp * tp))
        columns = tuple(tuple(range(shard, pp * tp, tp)) for shard in range(tp))
        return (
            Collective("all-reduce", row_bytes, (), depth=1),
            Collective("all-reduce", row_bytes, columns, depth=1),
            Collective("all-gather", rows * model.config.vocab_size * LOGIT_BYTES, (), depth=1),
            Collective("collective-permute", row_bytes, hops, depth=1),
        )

    @property
    def _hosts(self) -> tuple[int, ...]:
        devices = self.pp * self.stages.tp
        return tuple(device // (self.host_devices or devices) for device in range(devices))


@cache
def _places(config: ModelConfig, pp: int) -> int:
    return len(ring_cut(config, pp).numbers)
