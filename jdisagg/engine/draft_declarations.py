"""The programs around a step that verifies drafts, declared; those through the layers are in `programs.py`."""

from __future__ import annotations

from jdisagg.engine.declaration import DeclaredProgram, local_bytes
from jdisagg.engine.drafting import DraftPrograms
from jdisagg.engine.draw_declarations import Drawn


def declared_drafts(programs: DraftPrograms, slots: Drawn, rows: Drawn, length: int) -> list[DeclaredProgram]:
    """As `DraftingDecoder`: `slots` that draw, and `rows` of them all, tokens and drafts; length: of a history."""
    number = slots.rows
    history, state, wide = slots.ints(number, length), slots.ints(4, number), slots.ints(4, rows.rows)
    size, held = local_bytes(history), (history, state, wide)
    layers = programs.layers
    of_model = [] if layers is None else layers.declared(slots.stage + 1, number, length)
    if layers is not None:
        set_fed = slots.ints(number), slots.ints(), slots.ints()
        of_model.append(slots.program("draw set fed", layers.set_fed, set_fed))
    logits, given = rows.logits, slots.ints(number, rows.rows // number - 1)
    plain = history, slots.logits, state, slots.metadata
    return [
        *of_model,
        slots.program("draw guess", programs.widen, (history, state, slots.ints(number), given)),
        slots.program("draw noted greedy", programs.draw_greedy, plain, size),
        slots.program("draw noted", programs.draw, (*plain, slots.counts), size),
        slots.program("draw set tokens", programs.set_tokens, (history, slots.ints(), slots.ints(length)), size),
        rows.program("draw verify mask", programs.mask, (logits, rows.masks)),
        rows.program("draw firsts", programs.firsts, (logits,)),
        rows.program("draw verify greedy", programs.verify_greedy, (*held, logits, slots.metadata), size),
        rows.program("draw verify", programs.verify, (*held, logits, slots.logits, slots.metadata, slots.counts), size),
        rows.program("draw verify logprobs", programs.logprobs, (logits, slots.ints(rows.rows))),
    ]
