"""Declared programs of steps that verify drafts; those with layers are in `programs.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jdisagg.core.worker_config import WorkerConfig
from jdisagg.engine.declaration import DeclaredProgram, abstract, local_bytes, logit_bytes, whole
from jdisagg.engine.draw_declarations import SamplingShapes
from jdisagg.engine.sampling import FLOAT_COLUMNS, INT_COLUMNS, SamplingTensors
from jdisagg.engine.spec.draft_layers import ROWS, WIPED, DraftLayers
from jdisagg.engine.spec.drafting import LATE, DraftPrograms, history_length
from jdisagg.kv.pools import abstract_pool
from jdisagg.parallel.submesh import Program


def declared_drafts(
    programs: DraftPrograms, slots: SamplingShapes, widths: Sequence[SamplingShapes], config: WorkerConfig
) -> Iterator[DeclaredProgram]:
    """Yields the programs of `DraftingDecoder`: `slots` that sample, and for each width the rows of tokens and
    drafts."""
    number, layers, length, turns = (
        slots.rows,
        programs.layers,
        history_length(config),
        config.decode.steps_per_dispatch,
    )
    history, state = slots.ints(number, length), slots.ints(4, number)
    size, drawn = local_bytes(history), [slots.ints(number)] * LATE
    if layers is not None:
        yield from _guesses(layers, slots.stage + 1, number, length)
        yield from declared_reading(layers, slots.stage + 1, [layers.primed_tokens])
        yield slots.program("draw set fed", layers.set_fed, (slots.ints(number), slots.ints(), slots.ints()))
        unread = history, state, slots.ints(number), slots.ints(number, config.table_buckets[-1])
        places = slots.ints(2, config.max_chunk_seqs), slots.ints(layers.primed_tokens), slots.ints()
        yield slots.program("draw unread", layers.unread, (*unread, *places))
        if layers.kept:
            batch = whole(layers.submesh, (layers.worker.table_buckets[-1],)), whole(layers.submesh, ())
            found = _on_pages(layers, slots.stage + 1, "found", layers.found_program, batch, layers.kv_layers[:1])
            yield replace(found, donated_bytes=0)
    yield slots.program("draw note", programs.note, (history, state, *drawn), size)
    if turns > 1:
        batch = history, state, slots.ints(turns, number)
        yield slots.program("draw note turns", programs.note_turns, batch, size)
    yield slots.program("draw set tokens", programs.set_tokens, (history, slots.ints(), slots.ints(length)), size)
    if programs.head is not None:
        yield from programs.head.declared(slots, widths)
    for rows in widths:
        yield from _of_width(programs, slots, rows, length)


def _of_width(
    programs: DraftPrograms, slots: SamplingShapes, rows: SamplingShapes, length: int
) -> Iterator[DeclaredProgram]:
    number = slots.rows
    drafts, logits = rows.rows // number - 1, rows.logits
    history, state, reported = slots.ints(number, length), slots.ints(4, number), slots.ints(number, 2 + drafts)
    size, held = local_bytes(history), (history, state, slots.ints(4, rows.rows), logits, slots.metadata)
    guess = history, state, slots.ints(number), slots.ints(number, drafts)
    yield rows.program("draw guess", programs.widen, guess)
    yield rows.program("draw verify mask", programs.mask, (logits, rows.masks))
    yield rows.program("draw verify greedy", programs.verify_greedy, held, size)
    yield rows.program("draw verify", programs.verify, (*held, slots.counts), size)
    yield rows.program("draw verify logprobs", programs.logprobs, (logits, reported))
    yield rows.program("draw verify count", programs.count, (slots.counts, reported), local_bytes(slots.counts.output))


def _guesses(layers: DraftLayers, stage: int, slots: int, length: int) -> Iterator[DeclaredProgram]:
    """Yields the draft model's programs, as of a stage behind all others; length: positions of a history."""

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return whole(layers.submesh, shape)

    floats = whole(layers.submesh, (slots, FLOAT_COLUMNS), jnp.float32)
    metadata: Any = SamplingTensors(ints(slots, INT_COLUMNS), floats)  # pyright: ignore[reportArgumentType]
    held = ints(slots, length), ints(4, slots), ints(slots), ints(slots)
    for size in layers.worker.draft_sizes:
        for width in layers.worker.table_buckets:
            batch = ints(slots, width), *held, ints(slots, size), metadata
            yield _through(layers, f"guess {size}", stage, width, layers.guess_program, batch, slots)


def declared_reading(layers: DraftLayers, stage: int, sizes: Sequence[int]) -> Iterator[DeclaredProgram]:
    """Yields the programs in which the draft model reads chunks of these sizes, and wipes pages if its KV is
    shipped."""
    sequences, width = layers.worker.max_chunk_seqs, layers.worker.table_buckets[-1]
    for tokens in sizes:
        ints = [whole(layers.submesh, shape) for shape in ((ROWS, tokens), (2, sequences + 1), (sequences, width))]
        yield _through(layers, "prime", stage, tokens, layers.prefill_program, (*ints, None), tokens)
    if layers.kept:
        batch = whole(layers.submesh, (WIPED,)), whole(layers.submesh, (WIPED,))
        yield _on_pages(layers, stage, "wipe", layers.wipe_program, batch, layers.kv_layers)


def _through(
    layers: DraftLayers, kind: str, stage: int, size: int, program: Program, batch: tuple[Any, ...], rows: int
) -> DeclaredProgram:
    declared = _on_pages(layers, stage, kind, program, batch, layers.kv_layers)
    room = logit_bytes(layers.config, rows)
    return replace(declared, size=size, weights=abstract(layers.params.leaves), batch_bytes=room)


def _on_pages(
    layers: DraftLayers, stage: int, kind: str, program: Program, batch: tuple[Any, ...], held: range
) -> DeclaredProgram:
    """Declares a program over the pages of some layers, which it writes."""
    pools = [abstract_pool(layers.kv.layout, layers.worker.num_pages, layers.submesh)] * len(held)
    written, place = sum(map(local_bytes, pools)), (layers.submesh, held)
    return DeclaredProgram(kind, stage, WIPED, program, batch, *place, pools=pools, donated_bytes=written)
