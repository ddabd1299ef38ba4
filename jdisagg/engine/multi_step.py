"""Several decode steps of a worker of one stage in one dispatch: a loop around its layers and its sampling.

The host learns the tokens when the last step has ended, so no step may depend on it: rows with a grammar, penalties or
logprobs take single steps (`policy/scheduler.py`). Layers and sampling are those of single steps.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jdisagg.core.steps import DecodeRows
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.engine.decode import MASKED, Microbatch
from jdisagg.engine.expert_load import ExpertLoad
from jdisagg.engine.layer_group import LayerGroup, LayerGroupPrograms
from jdisagg.engine.multi_step_rows import (
    DRAWN,
    PLAIN,
    Drawn,
    PendingMultiStep,
    SentWidths,
    Slots,
    draw_left,
    with_left,
)
from jdisagg.engine.sampling import SamplingMetadata
from jdisagg.kv.pools import POOL_SPEC
from jdisagg.parallel.submesh import WHOLE, Program
from pallas_kernels.wire_format import Pool


class Carry(NamedTuple):
    """The loop's state between two steps, on one shard."""

    pools: list[Pool]
    state: Array  # i32[4, S]
    left: Array  # i32[S]
    tokens: Array  # i32[most, S]
    load: list[Array]  # i32[layers with experts, experts], where there are any


class MultiStepPrograms:
    """The programs for each kind of sampling, whether or not weights and pages exist."""

    def __init__(self, group: LayerGroupPrograms, most: int) -> None:
        assert group.is_first and group.is_last, "the turns of several stages go round, see `ring.py`"
        self.group, self.most = group, most
        self.kinds = {kind: self._program(kind) for kind in (PLAIN, DRAWN)}

    @property
    def programs(self) -> list[Program]:
        return [*self.kinds.values()]

    def _program(self, kind: str) -> Program:
        submesh = self.group.submesh
        specs = (self.group.params.specs, POOL_SPEC, WHOLE)
        results = [WHOLE] * (2 if self.group.sparse else 1)
        formats = (self.group.form.format, *[None] * len(results))
        turns = partial(self._turns, kind)
        return submesh.program(turns, specs, (POOL_SPEC, *results), (1,), formats, **self.group.compiled)

    # ------------------------------------------------------------ what one shard runs

    def _turns(self, kind: str, leaves: list[Array], pools: list[Pool], slots: Slots) -> tuple[Any, ...]:
        experts = self.group.config.experts
        load = [jnp.zeros((len(self.group.sparse), experts.number), jnp.int32)] if self.group.sparse and experts else []
        tokens = jnp.full((self.most, len(slots.left)), MASKED, jnp.int32)
        carry = Carry(list(pools), slots.state, slots.left, tokens, load)
        end = jax.lax.fori_loop(0, slots.turns, partial(self._turn, kind, leaves, slots), carry)
        return end.pools, *end.load, Drawn(end.tokens, None, None, end.state)

    def _turn(self, kind: str, leaves: list[Array], slots: Slots, turn: Array, carry: Carry) -> Carry:
        stepped = with_left(carry.state, carry.left)
        made: Any = self.group.decode_step(leaves, carry.pools, slots.table, stepped, None)
        pools, logits, *load = made
        state, tokens = draw_left(kind, logits, carry.state, carry.left, slots.metadata)
        return Carry(
            pools,
            state,
            carry.left - (tokens != MASKED).astype(jnp.int32),
            jax.lax.dynamic_update_index_in_dim(carry.tokens, tokens, turn, 0),
            [before + more for before, more in zip(carry.load, load, strict=True)],
        )


class MultiStep(MultiStepPrograms):
    """The programs of a worker whose weights are loaded and whose pages are allocated."""

    def __init__(self, group: LayerGroup, config: WorkerConfig) -> None:
        super().__init__(group, config.decode.steps_per_dispatch)
        self._held = group
        self._widths = SentWidths(config.num_slots, group.submesh.put)
        self._metadata: tuple[SamplingMetadata, SamplingMetadata] | None = None  # where it is drawn, and on all shards

    def run(self, step_id: int, plan: DecodeRows, batch: Microbatch) -> PendingMultiStep:
        """Dispatches the turns of a microbatch that knows what the plan changes."""
        asked = batch.asked(plan.active)
        kind = PLAIN if asked.plain else DRAWN
        drawn = self._dispatch(kind, self._slots(plan, batch))
        batch.state = self._held.submesh.first_copy(drawn.state)
        drawn.tokens.copy_to_host_async()
        load = self._held.load
        counts: tuple[tuple[ExpertLoad, list[Array]], ...] = ((load, load.taken()),) if self._held.sparse else ()
        return PendingMultiStep(step_id, plan, drawn, asked.wanted, counts)

    def _dispatch(self, kind: str, slots: Slots) -> Drawn:
        kv = self._held.kv
        kv.pools, *loads, drawn = self.kinds[kind](self._held.params.leaves, kv.pools, slots)
        self._held.load.leaves(loads)
        return drawn

    def _slots(self, plan: DecodeRows, batch: Microbatch) -> Slots:
        submesh = self._held.submesh
        table = batch.table_on(submesh, plan.table_pages)
        state = batch.state if submesh.tp == 1 else submesh.spread(batch.state)  # it is drawn here
        if self._metadata is None or self._metadata[0] is not batch.metadata:
            self._metadata = batch.metadata, SamplingMetadata(*map(submesh.spread, batch.metadata))
        return Slots(table, state, *self._widths.of(plan), self._metadata[1])
