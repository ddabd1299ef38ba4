"""A small model that guesses what the rows of a decode worker draw next, beside the model that is served.

Its KV lies in pages of its own with the numbers of the other's, so that a slot's page table serves both. None of it is
handed over: it is a function of a sequence's tokens, and the model is small, so that it is made where the tokens are.
A prompt's when its slot is taken, by chunks; a drawn token's when the next guess is made, as many at once as were
drawn since the last one, LATELY at most. So a guess is as good after a handoff, a preemption, a migration, a prefix
that was there, or steps that wanted no guess.

A guess is drawn as the token itself will be, with the same number for the same seed and position (`sampling.pick`): two
distributions that are alike then draw alike, at any temperature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from jdisagg.core.kv_layout import KVLayout
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.steps import Admission, PrefillChunk, PrefillChunks
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.engine.declaration import DeclaredProgram, local_bytes, logit_bytes, whole
from jdisagg.engine.decode import POSITION, TOKEN
from jdisagg.engine.layer_group import Chunks, LayerGroup, running
from jdisagg.engine.prefill import pack
from jdisagg.engine.sampling import (
    FLOAT_COLUMNS,
    INT_COLUMNS,
    TEMPERATURE,
    SamplingMetadata,
    pick,
    pick_greedy,
)
from jdisagg.kv.pools import abstract_pool
from jdisagg.model.draft_head import HeadModel
from jdisagg.model.params import StageParams, StageSpec, load_stage
from jdisagg.model.sources import Source
from jdisagg.parallel.submesh import Program, Submesh
from pallas_kernels.wire_format import Pool

LATELY = 8  # tokens of a slot that one guess reads at most, besides those it guesses
PRIMED = 256  # tokens of a prompt that one program reads
FREE = -2  # where a guess is wanted


@dataclass(frozen=True)
class DraftModel:
    """A model that guesses, and where its weights are."""

    source: Source
    config: ModelConfig


class DraftLayers(LayerGroup):
    """All layers of such a model on the devices that draw, and the pages of a worker's pool once more."""

    def __init__(
        self,
        params: StageParams,
        config: ModelConfig,
        submesh: Submesh,
        layout: KVLayout,
        worker: WorkerConfig,
    ) -> None:
        super().__init__(params, config, range(config.num_layers), submesh, layout, worker.num_pages)
        self.worker = worker
        self.guess_program = self._program(self._guess, 7, 2)
        self.set_fed = Program(lambda fed, row, tokens: fed.at[row].set(tokens))

    @property
    def programs(self) -> list[Program]:
        return [*super().programs, self.guess_program, self.set_fed]

    # ------------------------------------------------------------ a prompt

    def prime(self, admission: Admission) -> None:
        """Reads what one that takes a slot holds, but for the token that is fed next."""
        tokens, pages = admission.history.whole[: admission.position], admission.pages
        for start in range(0, len(tokens), self.primed_tokens):
            part = tokens[start : start + self.primed_tokens]
            held = pages[: self.worker.pages_for(start + len(part))]
            chunk = PrefillChunk(admission.request_id, part, start, held, last=False, sampling=admission.sampling)
            packed = pack(PrefillChunks((chunk,), self.primed_tokens, self.worker.table_buckets[-1]), self.worker)
            self.prefill(Chunks(*self.submesh.put((packed.rows, packed.spans, packed.table))), None)

    @property
    def primed_tokens(self) -> int:
        return min(PRIMED, self.worker.max_model_len)

    # ------------------------------------------------------------ a guess

    def guess(
        self, table: Array, history: Array, state: Array, fed: Array, widths: Array, given: Array, metadata: Any
    ) -> tuple[Array, Array]:
        """(what may follow each slot's token, i32[B, drafts], as `given` where that is not FREE; fed), where tokens
        are drawn. FREE is left where a slot's last tokens are more than were read here."""
        here = self.submesh.spread
        held = here(history), here(state), here(fed), here(widths), here(given), SamplingMetadata(*map(here, metadata))
        self.kv.pools, guess, fed = self.guess_program(self.params.leaves, self.kv.pools, table, *held)
        return guess.addressable_data(0), fed.addressable_data(0)

    def _guess(
        self,
        leaves: list[Array],
        pools: list[Pool],
        table: Array,
        history: Array,
        state: Array,
        fed: Array,
        widths: Array,
        given: Array,
        metadata: SamplingMetadata,
    ) -> tuple[list[Pool] | Array, ...]:
        """fed i32[B]: tokens whose KV is there, unless they were guesses and others were drawn."""
        position, wanted = state[POSITION], running(state) & (widths > 1)
        fed = jnp.minimum(fed, position)
        pools, logits, read = self._read_lately(leaves, pools, table, history, position, fed, wanted)
        on, fed = wanted & (read > position), jnp.where(wanted, read, fed)
        guess = [drawn_alike(logits, metadata, position + 1)]
        for ahead in range(1, given.shape[1]):
            enabled = on & (widths > ahead)
            rows = rows_of(guess[-1], position + ahead, enabled)
            made: Any = self.decode_step(leaves, pools, table, rows, None)
            pools, logits = made[0], made[1]
            fed = jnp.where(enabled, position + ahead + 1, fed)
            guess.append(drawn_alike(logits, metadata, position + ahead + 1))
        found = jnp.where(on[:, None], jnp.stack(guess, axis=1), FREE)
        return pools, jnp.where(given == FREE, found, given), fed

    def _read_lately(
        self,
        leaves: list[Array],
        pools: list[Pool],
        table: Array,
        history: Array,
        position: Array,
        fed: Array,
        wanted: Array,
    ) -> tuple[list[Pool], Array, Array]:
        """Reads up to LATELY tokens a slot: the pools, logits f32[B, V] behind the last one read, and how many tokens
        have been read i32[B]."""
        places = fed[:, None] + jnp.arange(LATELY)[None, :]
        tokens = jnp.take_along_axis(history, jnp.minimum(places, history.shape[1] - 1), axis=1)
        rows = rows_of(tokens, places, wanted[:, None] & (places <= position[:, None]))
        stage, x = self._run(leaves, None, rows[TOKEN])
        slots, adapters = self._slots(pools, table, rows)
        x, layers = self._run_layers(stage, pools, (slots, None), running(rows), adapters, x, rows[POSITION])
        x = x.reshape(*places.shape, -1)
        read = jnp.minimum(fed + LATELY, position + 1)
        last = jnp.take_along_axis(x, jnp.maximum(read - fed - 1, 0)[:, None, None], axis=1)[:, 0]
        return layers.pools, stage.logits(last), read

    # ------------------------------------------------------------ what is declared

    def declared(self, stage: int, slots: int, history_length: int) -> list[DeclaredProgram]:
        """Its programs, as on the stage behind all others."""
        return [*self._declared_guesses(stage, slots, history_length), self._declared_prime(stage)]

    def _declared_guesses(self, stage: int, slots: int, length: int) -> list[DeclaredProgram]:
        def ints(*shape: int) -> jax.ShapeDtypeStruct:
            return whole(self.submesh, shape)

        floats = whole(self.submesh, (slots, FLOAT_COLUMNS), jnp.float32)
        metadata: Any = SamplingMetadata(ints(slots, INT_COLUMNS), floats)  # pyright: ignore[reportArgumentType]
        held = ints(slots, length), ints(4, slots), ints(slots), ints(slots)
        return [
            self._declare(
                f"guess {size}",
                stage,
                width,
                self.guess_program,
                (ints(slots, width), *held, ints(slots, size), metadata),
                slots,
            )
            for size in self.worker.draft_sizes
            for width in self.worker.table_buckets
        ]

    def _declared_prime(self, stage: int) -> DeclaredProgram:
        tokens, sequences, width = self.primed_tokens, self.worker.max_chunk_seqs, self.worker.table_buckets[-1]
        ints = [whole(self.submesh, shape) for shape in ((3, tokens), (2, sequences + 1), (sequences, width))]
        return self._declare("prime", stage, tokens, self.prefill_program, (*ints, None), tokens)

    def _declare(
        self, kind: str, stage: int, size: int, program: Program, batch: tuple[Any, ...], rows: int
    ) -> DeclaredProgram:
        pools = [abstract_pool(self.kv.layout, self.worker.num_pages, self.submesh)] * len(self.layers)
        return DeclaredProgram(
            kind,
            stage,
            size,
            program,
            batch,
            self.submesh,
            self.layers,
            [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for leaf in self.params.leaves],
            pools,
            batch_bytes=logit_bytes(self.config, rows),
            donated_bytes=sum(map(local_bytes, pools)),
        )


def rows_of(tokens: Array, positions: Array, enabled: Array) -> Array:
    """A state i32[4, N] of such rows, one behind the other."""
    rows = tokens, positions, jnp.zeros_like(positions), enabled.astype(jnp.int32)
    return jnp.stack([each.reshape(-1) for each in rows])


def drawn_alike(logits: Array, metadata: SamplingMetadata, positions: Array) -> Array:
    """i32[B]: what each slot would draw, were these its logits."""

    def drawn(logits: Array) -> Array:
        return pick(logits, metadata, None, positions)

    any_drawn = jnp.any(metadata.floats[:, TEMPERATURE] > 0)
    return jnp.maximum(jax.lax.cond(any_drawn, drawn, pick_greedy, logits), 0)


class Beside(Protocol):
    """What the machine of the other model is made of."""

    @property
    def draft(self) -> DraftModel | HeadModel | None: ...
    @property
    def layout(self) -> KVLayout: ...
    @property
    def dtype(self) -> DTypeLike: ...


def open_draft(place: Beside, worker: WorkerConfig, submesh: Submesh) -> DraftLayers | None:
    """The model that a worker guesses by, on its last stage; None where it needs none."""
    if not isinstance(place.draft, DraftModel) or not (worker.role.decodes and worker.draft_tokens):
        return None
    source, config = place.draft.source, place.draft.config
    params = load_stage(source, StageSpec(config, range(config.num_layers), submesh.mesh, place.dtype))
    dtype = str(jnp.dtype(place.dtype)) if place.layout.scaled else place.layout.dtype  # it is small: no scales
    layout = KVLayout.of(config, worker.page_size, dtype, place.layout.tiled)
    return DraftLayers(params, config, submesh, layout, worker)


def primed(layers: DraftLayers, fed: Array, row: int, admission: Admission) -> Array:
    """Fed i32[B], the slot of `row` having read what it holds."""
    if admission.history.whole:
        layers.prime(admission)
    return layers.set_fed(fed, *jax.device_put((np.int32(row), np.int32(admission.position)), fed.device))
