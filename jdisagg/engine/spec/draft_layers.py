"""A draft model: a small model that predicts the next tokens of a decode worker's rows.

Its KV is in pages of its own with the page numbers of the served model, so that a slot's page table serves both. If
this KV is kept, every worker that computes prompt tokens also runs the draft model over them. Its pages are then
shipped, demoted and found as prefixes with those of the served model; its layers are numbered behind the model's.
Sampled tokens are processed when the next draft is made, up to LATELY at once. Missing KV is computed from the tokens
when a draft is wanted (`drafting.DraftReading`). Drafts are therefore equally good after a handoff, a preemption, a
migration, a prefix hit, or steps without drafts. Page rows that the draft model has not written are zeros, so pages
show which of their tokens are valid.

A draft is sampled as the token itself will be, with the same random number for the same seed and position
(`sampling.pick`): two similar distributions then give the same token, at any temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from jdisagg.core.layout.kv_layout import NULL_PAGE, DraftPages, KVLayout
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.steps import Admission, KVTransfer
from jdisagg.core.worker_config import DRAFT_READS, DRAFT_READS_LATELY, WorkerConfig
from jdisagg.engine.decode import POSITION, TOKEN
from jdisagg.engine.layer_group import Chunks, LayerGroup, running
from jdisagg.engine.prefill import PackedChunks, unread_chunks
from jdisagg.engine.sampling import TEMPERATURE, SamplingTensors, pick, pick_greedy
from jdisagg.kv.pools import POOL_SPEC
from jdisagg.kv.shipping import HeadSlices, insert_shard
from jdisagg.model.draft_head import HeadModel
from jdisagg.model.params import StageParams, StageSpec, load_stage
from jdisagg.model.sources import TensorSource
from jdisagg.parallel.submesh import WHOLE, Program, StageMesh
from pallas_kernels.quantized import stored
from pallas_kernels.wire_format import Pool

LATELY, PRIMED = DRAFT_READS_LATELY, DRAFT_READS
WIPED = 16  # pages that one program wipes
ROWS = 3  # of packed chunks without adapters
FREE = -2  # a position for which a draft is wanted


@dataclass(frozen=True)
class DraftModel:
    """A draft model and the source of its weights."""

    source: TensorSource
    config: ModelConfig
    name: str = "draft"  # distinguishes draft models and their weights


class DraftLayers(LayerGroup):
    """All layers of a draft model on the devices that sample, with as many pages as the worker's pool."""

    def __init__(
        self,
        params: StageParams,
        config: ModelConfig,
        submesh: StageMesh,
        pages: DraftPages,
        worker: WorkerConfig,
    ) -> None:
        self.pages = pages
        super().__init__(params, config, range(config.num_layers), submesh, pages.layout, worker.num_pages)
        self.worker, self.kv.draft = worker, pages.name
        self.guess_program = self._program(self._guess, 7, 2)
        self.set_fed, self.unread = Program(fed_set), Program(unread_chunks)
        own = (POOL_SPEC, WHOLE), (self.form.format, None)
        self.wipe_program = submesh.program(wiped, (POOL_SPEC, WHOLE, WHOLE), own[0], (0,), own[1], as_stored=True)
        self.found_program = submesh.program(found_in, (POOL_SPEC, WHOLE, WHOLE), WHOLE)

    @property
    def kv_layers(self) -> range:
        return self.pages.layers

    @property
    def programs(self) -> list[Program]:
        own = [self.guess_program, self.set_fed, self.unread, self.wipe_program, self.found_program]
        return [*super().programs, *own]

    # ------------------------------------------------------------ pages

    @property
    def kept(self) -> bool:
        """Returns True if the draft's KV is shipped and stored wherever the model's is."""
        return self.worker.draft_layers > 0

    def wipe(self, rows: Sequence[tuple[int, int]]) -> None:
        """Zeros the unwritten rows of pages; rows: (page, first row to zero)."""
        for start in range(0, len(rows), WIPED):
            padded = np.full((2, WIPED), NULL_PAGE, np.int32)
            padded[:, : len(rows[start : start + WIPED])] = np.array(rows[start : start + WIPED], np.int32).T
            self.kv.pools, _ = self.wipe_program(self.kv.pools, *self.submesh.put((padded[0], padded[1])))

    def arrived(self, transfer: KVTransfer, layers: Sequence[range]) -> None:
        """Wipes the draft's part of arrived pages if the transfer brought only the model's layers."""
        ends = self.pages.first_layer
        if (transfer.layers is None or transfer.layers[1] >= ends) and all(each.start < ends for each in layers):
            self.wipe([(page, 0) for page in transfer.destination_pages])

    def found(self, admission: Admission) -> Array:
        """Returns i32[] on the device that samples: how many of an admitted sequence's first tokens have draft KV."""
        table = np.zeros(self.worker.table_buckets[-1], np.int32)
        table[: len(admission.pages)] = admission.pages
        place = self.submesh.put((table, np.asarray(admission.position, np.int32)))
        return self.found_program(self.kv.pools[:1], *place).addressable_data(0)

    def read(self, packed: PackedChunks, chunks: Chunks | None = None) -> None:
        """Runs the draft model over chunks of prompts; chunks: their copy on this submesh, if there is one."""
        if chunks is None or len(packed.rows) > ROWS:  # adapters belong to the served model
            chunks = Chunks(*self.submesh.put((packed.rows[:ROWS], packed.spans, packed.table)))
        self.prefill(chunks, None)

    @property
    def primed_tokens(self) -> int:
        return min(PRIMED, self.worker.max_model_len)

    # ------------------------------------------------------------ drafts

    def guess(
        self, table: Array, history: Array, state: Array, fed: Array, widths: Array, given: Array, metadata: Any
    ) -> tuple[Array, Array]:
        """Returns (draft tokens i32[B, drafts], fed) on the device that samples. Positions of `given` that are not FREE
        are kept. FREE remains for slots with more unread tokens than the program reads."""
        here = self.submesh.spread
        held = here(history), here(state), here(fed), here(widths), here(given), SamplingTensors(*map(here, metadata))
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
        metadata: SamplingTensors,
    ) -> tuple[list[Pool] | Array, ...]:
        """Makes the drafts; fed i32[B]: tokens with KV in the pages, rejected drafts possibly among them."""
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
        """Processes up to LATELY tokens per slot; returns the pools, the logits f32[B, V] after the last one, and the
        number of processed tokens i32[B]."""
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


def fed_set(fed: Array, row: Array, tokens: Array) -> Array:
    return fed.at[row].set(tokens)


def found_in(pools: list[Pool], table: Array, position: Array) -> Array:
    """Returns i32[]: the tokens before `position` with keys and values in the pages, counted from the first without a
    gap. table i32[W]: a slot's pages. Rows that were never written are zeros, and no token's keys are all zeros."""
    there = jnp.any(stored(pools[0])[table] != 0, axis=(1, 2, 4)).reshape(-1)
    there &= jnp.arange(there.shape[0]) < position
    return jnp.sum(jnp.cumprod(there.astype(jnp.int32)))


def wiped(pools: list[Pool], pages: Array, firsts: Array) -> tuple[list[Pool], Array]:
    """Zeros each page from a row on; the second result becomes ready when that is done."""
    held: Any = jnp.stack([stored(pool)[pages] for pool in pools])
    left = jnp.arange(held.shape[4])[None, :] < firsts[:, None]
    values = jnp.where(left[None, :, None, None, :, None], held, 0).astype(held.dtype)
    return insert_shard(pools, pages, HeadSlices([values], [], [], [])), pages[:1]


def rows_of(tokens: Array, positions: Array, enabled: Array) -> Array:
    """Returns the state i32[4, N] of these rows, flattened."""
    rows = tokens, positions, jnp.zeros_like(positions), enabled.astype(jnp.int32)
    return jnp.stack([each.reshape(-1) for each in rows])


def drawn_alike(logits: Array, metadata: SamplingTensors, positions: Array) -> Array:
    """Returns i32[B]: the token that each slot would sample from these logits."""

    def drawn(logits: Array) -> Array:
        return pick(logits, metadata, None, positions)

    any_drawn = jnp.any(metadata.floats[:, TEMPERATURE] > 0)
    return jnp.maximum(jax.lax.cond(any_drawn, drawn, pick_greedy, logits), 0)


class DraftSettings(Protocol):
    """The settings that a draft model takes from the executor of the served model."""

    @property
    def draft(self) -> DraftModel | HeadModel | None: ...
    @property
    def layout(self) -> KVLayout: ...
    @property
    def dtype(self) -> DTypeLike: ...


def open_draft(
    place: DraftSettings, worker: WorkerConfig, model: ModelConfig, submesh: StageMesh
) -> DraftLayers | None:
    """Loads the draft model of a worker on its last stage; None if the worker neither drafts nor runs it for others.
    model: the served model."""
    draft, guesses = place.draft, worker.role.decodes and worker.draft_tokens
    if not isinstance(draft, DraftModel) or not (worker.draft_layers or guesses):
        return None
    layers = range(draft.config.num_layers)
    params = load_stage(draft.source, StageSpec(draft.config, layers, submesh.mesh, place.dtype))
    dtype = (
        str(jnp.dtype(place.dtype)) if place.layout.scaled else place.layout.dtype
    )  # the draft is small and not quantised
    layout = KVLayout.of(draft.config, worker.page_size, dtype, place.layout.tiled)
    pages = DraftPages(draft.name, layout, model.num_layers)
    return DraftLayers(params, draft.config, submesh, pages, worker)
