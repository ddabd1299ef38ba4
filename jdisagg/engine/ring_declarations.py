"""Declared programs of a decode ring; see `programs.py`, whose table of transfers all workers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jdisagg.core.layout.kv_layout import KVLayout
from jdisagg.core.layout.stages import RingCut, ring_cut
from jdisagg.core.model_config import AS_MADE, ModelConfig, WeightFormat
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.engine.declaration import DeclaredProgram, abstract, local_bytes, logit_bytes
from jdisagg.engine.multi_step import PLAIN, DispatchSlots
from jdisagg.engine.programs import ProgramTable, activation_bytes, room_of, transfer_programs_of
from jdisagg.engine.ring import RingPrograms
from jdisagg.engine.sampling import FLOAT_COLUMNS, INT_COLUMNS, SamplingTensors, TokenCounters
from jdisagg.kv.pools import abstract_ring_pool
from jdisagg.model.grammars.grammars import mask_words
from jdisagg.model.ring_params import ring_outline
from jdisagg.parallel.submesh import Device, Program, RingMesh


@dataclass(frozen=True)
class RingTable(ProgramTable):
    """The program table of a ring. `layer_groups` are the ring's stages, which have no steps of their own; stage
    `num_stages` is the ring itself."""

    ring: RingPrograms | None = None

    @property
    def owned(self) -> list[Program]:
        return [*super().owned, *self._ring.programs]

    @property
    def _ring(self) -> RingPrograms:
        assert self.ring is not None
        return self.ring

    def steps(self) -> list[DeclaredProgram]:
        widths = self.config.table_buckets
        turns = [self._turns(kind, program, width) for kind, program in self._ring.turns.items() for width in widths]
        adapters = self._ring.adapters
        return [*turns, *self._changes(), *([] if adapters is None else [adapters.declared(self._ring.ring.pp)])]

    def weight_bytes(self, stage: int) -> int:
        """Returns the weight bytes on one device; all devices hold the same."""
        return sum(local_bytes(leaf) for leaf in self._ring.params.leaves)

    def pool_bytes(self, stage: int, layers: int | None = None) -> int:
        """Returns the page bytes of `layers` layers on one device; None: of all layer positions, padding included."""
        return super().pool_bytes(stage, len(self._ring.cut.numbers) if layers is None else layers)

    def _turns(self, kind: str, program: Program, width: int) -> DeclaredProgram:
        ring, places = self._ring, len(self._ring.cut.numbers)
        pool = abstract_ring_pool(self.layout, self.config.num_pages, ring.ring)
        rows = self.config.num_slots // ring.ring.pp
        windows = tuple({self.model.window(layer) for layer in ring.cut.numbers})
        return DeclaredProgram(
            f"ring {kind}",
            ring.ring.pp,
            width,
            program,
            (self._slots(kind, width),),
            ring.ring,
            range(places),
            abstract(ring.params.leaves),
            [pool] * places,
            (ring.ring.pp, windows),
            activation_bytes(self.model, self.dtype, rows, ring.ring.tp)
            + logit_bytes(self.model, rows)
            + self._kept_bytes(kind),
            self.pool_bytes(0),
            self._collectives(),
            loops=(ticks(self.config),),
        )

    def _kept_bytes(self, kind: str) -> int:
        """Returns the bytes of token counts in the loop state, which exists twice."""
        return 0 if kind == PLAIN else 4 * self.config.num_slots * self.model.vocab_size * 5

    def _collectives(self) -> dict[str, int]:
        """Returns the collectives of one tick: sums of the layers, of the embedding and of the last stage's output, the
        gather of logits, and the hop."""
        ring = self._ring
        sums = ring.params.num_reductions if ring.ring.tp > 1 else 0
        return {"all-reduce": sums + 2, "all-gather": 1, "collective-permute": 1}

    def _slots(self, kind: str, width: int) -> DispatchSlots:
        slots, vocab_size = self.config.num_slots, self.model.vocab_size
        metadata = SamplingTensors(
            self._whole(slots, INT_COLUMNS), self._whole(slots, FLOAT_COLUMNS, dtype=jnp.float32)
        )
        counts = None if kind == PLAIN else self._counts(vocab_size)
        allowed = None if kind == PLAIN else self._whole(slots, mask_words(vocab_size), dtype=jnp.uint32)
        state = self._whole(4, slots), self._whole(slots), self._whole()
        return DispatchSlots(self._whole(slots, width + self.config.adapter_columns), *state, metadata, counts, allowed)

    def _counts(self, vocab_size: int) -> Any:
        slots = self.config.num_slots
        return TokenCounters(self._whole(slots, vocab_size, dtype=jnp.bool_), self._whole(slots, vocab_size))

    def _whole(self, *shape: int, dtype: DTypeLike = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._ring.ring.whole)

    def _changes(self) -> list[DeclaredProgram]:
        ring, slots, vocab_size = self._ring, self.config.num_slots, self.model.vocab_size
        state, counts = self._whole(4, slots), self._counts(vocab_size)
        row = self._whole(), self._whole(vocab_size, dtype=jnp.bool_), self._whole(vocab_size)
        room = logit_bytes(self.model, slots)
        both = sum(map(local_bytes, counts))
        return [
            DeclaredProgram("draw steer", ring.ring.pp, slots, ring.steer, (state, state), ring.ring, batch_bytes=room),
            DeclaredProgram(
                "draw set row",
                ring.ring.pp,
                slots,
                ring.set_row_program,
                (counts, *row),
                ring.ring,
                batch_bytes=room,
                donated_bytes=both,
            ),
        ]


def ticks(config: WorkerConfig) -> int:
    """Returns the ticks of a dispatch of the most steps that the worker allows."""
    return config.decode.steps_per_dispatch * config.decode.n + config.decode.n - 1


class AbstractRingStage:
    """A stage of a ring with shapes instead of weights and pages."""

    programs: tuple[Program, ...] = ()
    joined = False  # each layer position has a pool

    def __init__(self, cut: RingCut, ring: RingMesh, stage: int) -> None:
        self.layers = self.kv_layers = cut.runs[stage]
        self.submesh = ring.stages[stage]


def abstract_ring_table(
    config: WorkerConfig,
    model: ModelConfig,
    layout: KVLayout,
    devices: Sequence[Device],
    dtype: DTypeLike,
    weights: WeightFormat = AS_MADE,
) -> RingTable:
    """Returns the program table of a ring without weights or pages, see `abstract_table`."""
    ring, cut = RingMesh(devices, config.decode.n), ring_cut(model, config.decode.n)
    params = ring_outline(model, cut, ring, dtype, weights).params
    sizes = config.num_slots, config.decode.steps_per_dispatch, room_of(config, dtype)
    programs = RingPrograms(model, cut, ring, params, *sizes)
    stages: Any = [AbstractRingStage(cut, ring, stage) for stage in range(ring.pp)]
    transfers = transfer_programs_of(config, ring.stages, layout)
    return RingTable(config, model, layout, dtype, stages, transfers, None, None, programs)
