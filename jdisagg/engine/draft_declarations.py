"""The programs around a step that verifies drafts, declared; those through the layers are in `programs.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jdisagg.core.worker_config import WorkerConfig
from jdisagg.engine.declaration import DeclaredProgram, local_bytes
from jdisagg.engine.drafting import LATE, DraftPrograms, history_length
from jdisagg.engine.draw_declarations import Drawn


def declared_drafts(
    programs: DraftPrograms, slots: Drawn, widths: Sequence[Drawn], config: WorkerConfig
) -> Iterator[DeclaredProgram]:
    """As `DraftingDecoder`: `slots` that draw, and `widths` of rows of them all, tokens and drafts."""
    number, layers, length, turns = slots.rows, programs.layers, history_length(config), config.decode_turns
    history, state = slots.ints(number, length), slots.ints(4, number)
    size, drawn = local_bytes(history), [slots.ints(number)] * LATE
    if layers is not None:
        yield from layers.declared(slots.stage + 1, number, length)
        yield slots.program("draw set fed", layers.set_fed, (slots.ints(number), slots.ints(), slots.ints()))
    yield slots.program("draw note", programs.note, (history, state, *drawn), size)
    if turns > 1:
        told = history, state, slots.ints(turns, number)
        yield slots.program("draw note turns", programs.note_turns, told, size)
    yield slots.program("draw set tokens", programs.set_tokens, (history, slots.ints(), slots.ints(length)), size)
    if programs.head is not None:
        yield from programs.head.declared(slots, widths)
    for rows in widths:
        yield from _of_width(programs, slots, rows, length)


def _of_width(programs: DraftPrograms, slots: Drawn, rows: Drawn, length: int) -> Iterator[DeclaredProgram]:
    number = slots.rows
    drafts, logits = rows.rows // number - 1, rows.logits
    history, state, told = slots.ints(number, length), slots.ints(4, number), slots.ints(number, 2 + drafts)
    size, held = local_bytes(history), (history, state, slots.ints(4, rows.rows), logits, slots.metadata)
    guess = history, state, slots.ints(number), slots.ints(number, drafts)
    yield rows.program("draw guess", programs.widen, guess)
    yield rows.program("draw verify mask", programs.mask, (logits, rows.masks))
    yield rows.program("draw verify greedy", programs.verify_greedy, held, size)
    yield rows.program("draw verify", programs.verify, (*held, slots.counts), size)
    yield rows.program("draw verify logprobs", programs.logprobs, (logits, told))
    yield rows.program("draw verify count", programs.count, (slots.counts, told), local_bytes(slots.counts.output))
