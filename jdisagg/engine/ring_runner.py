"""Runs a ring's steps: the host's part of `ring.py`. A dispatch holds the rows of all slots, of one turn or several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import Array

from jdisagg.core.layout.kv_layout import KVLayout
from jdisagg.core.layout.stages import RingCut
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.steps import DecodeRows, StepPlan
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.engine.adapter_slots import AdapterSlots
from jdisagg.engine.decode import Microbatch
from jdisagg.engine.executor import GroupDone, PendingStep
from jdisagg.engine.expert_load import ExpertLoad
from jdisagg.engine.gates import Gates
from jdisagg.engine.grammar_masks import EVERYTHING
from jdisagg.engine.multi_step_rows import DRAWN, PLAIN, SCORED, Drawn, PendingMultiStep, SentWidths, Slots
from jdisagg.engine.ring import RingPrograms
from jdisagg.engine.sampling import Counts
from jdisagg.kv.pools import RingPages
from jdisagg.model.grammars.grammars import Grammars
from jdisagg.model.lora import AdapterCapacity
from jdisagg.model.ring_params import RingParams
from jdisagg.parallel.submesh import Program, RingMesh


class LoadedRing(RingPrograms):
    """A ring that runs: its weights are loaded and its pages allocated."""

    joined = False  # each place has a pool

    def __init__(
        self,
        config: WorkerConfig,
        model: ModelConfig,
        layout: KVLayout,
        cut: RingCut,
        ring: RingMesh,
        params: RingParams,
        room: AdapterCapacity | None = None,
    ) -> None:
        super().__init__(model, cut, ring, params, config.num_slots, config.decode.steps_per_dispatch, room)
        self.kv = RingPages(layout, cut, config.num_pages, ring)
        self.layers, self.submesh = range(len(cut.numbers)), ring
        self.kv_layers = self.layers
        self.stages = [RingStage(self, stage) for stage in range(ring.pp)]

    def dispatch(self, kind: str, slots: Slots) -> Drawn:
        self.kv.pools[:], *loads, drawn = self.turns[kind](self.params.leaves, self.kv.pools, slots)
        for stage in self.stages:
            stage.load_leaves(loads)
        return drawn


class RingStage:
    """One stage of a ring as shipments and figures see it: its layers, its submesh, its pages."""

    programs: tuple[Program, ...] = ()  # those of the ring are not its own
    joined = False

    def __init__(self, ring: LoadedRing, stage: int) -> None:
        self.layers = self.kv_layers = ring.cut.runs[stage]
        self.submesh = ring.ring.stages[stage]
        self.kv, self.params = ring.kv.stages[stage], _Share(ring.params.num_bytes // ring.ring.pp)
        self.is_first, self.is_last = stage == 0, stage == ring.ring.pp - 1
        rows = [row for row, place in enumerate(ring.sparse) if ring.cut.places[stage][place] is not None]
        layers = [ring.cut.places[stage][ring.sparse[row]] for row in rows]
        self.sparse = [layer for layer in layers if layer is not None]
        self.load = ExpertLoad(self.sparse, ring.model.experts, rows)
        self._ring, self._stage = ring.ring, stage

    def load_leaves(self, loads: list[Array]) -> None:
        """Counts of all stages, of which this process may hold this one's."""
        for each in loads if self.sparse and self.submesh.local_devices else ():
            here = self.submesh.local_devices[0]
            self.load.leaves([shard.data for shard in each.addressable_shards if shard.device == here])


@dataclass(frozen=True)
class _Share:
    """A stage's part of the ring's weights."""

    num_bytes: int
    leaves: tuple[Any, ...] = ()


class RingRunner:
    """One ring's slots, and its steps."""

    prefiller = None  # it computes no prompts
    draft, programs = None, dict[str, Any]()  # a row's turns are its own, in the ring's program
    decoder = None  # what draws is part of the ring's program

    def __init__(
        self,
        ring: LoadedRing,
        config: WorkerConfig,
        grammars: Grammars | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self.ring, self.config, self.adapters, self.gates = ring, config, adapters, Gates()
        sizes = config.num_slots, config.table_buckets[-1], ring.model.vocab_size
        self.slots = Microbatch(0, *sizes, ring.ring.put, grammars)
        self._everything: Array = ring.ring.put(np.full((sizes[0], self.slots.masks.words), EVERYTHING))
        self._widths = SentWidths(config.num_slots, ring.ring.put)

    def run(self, plan: StepPlan, group_done: GroupDone | None = None) -> PendingStep:
        """See `executor.Executor.run`."""
        rows = plan.decode
        assert rows is not None and plan.prefill is None and not rows.gates, "a ring decodes, and waits at no gate"
        self.slots.send_changes(rows, self.ring.steer, self.ring.set_row)
        asked, allowed = self.slots.asked(rows.active), self.slots.allowed(rows.active)
        if self.adapters is not None:
            self.adapters.here(asked.each)
            self.slots.find_adapters(self.adapters, rows.active)
        kind = SCORED if asked.scored else DRAWN
        kind = PLAIN if kind == DRAWN and allowed is None and asked.plain else kind
        drawn = self.ring.dispatch(kind, self._slots(rows, kind, allowed))
        self.slots.state = drawn.state
        if drawn.output is not None:
            self.slots.counts = Counts(self.slots.counts.prompt, drawn.output)
        for array in (drawn.tokens, *(drawn.logprobs or ())):
            array.copy_to_host_async()
        counts = tuple((stage.load, stage.load.taken()) for stage in self.ring.stages if stage.sparse)
        return PendingMultiStep(plan.step_id, rows, drawn, asked.wanted, counts)

    def _slots(self, rows: DecodeRows, kind: str, allowed: Array | None) -> Slots:
        table, batch = self.slots.table_on(self.ring.ring, rows.table_pages), self.slots
        left, turns = self._widths.of(rows)
        drawn = (None, None) if kind == PLAIN else (batch.counts, self._everything if allowed is None else allowed)
        return Slots(table, batch.state, left, turns, batch.metadata, *drawn)
