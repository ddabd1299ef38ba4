"""Declared programs of several decode steps: each like the single step of the same slots, whose layers it runs."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp

from jdisagg.engine.declaration import DeclaredProgram, logit_bytes, whole
from jdisagg.engine.multi_step import MultiStepPrograms
from jdisagg.engine.multi_step_rows import Slots
from jdisagg.engine.sampling import FLOAT_COLUMNS, INT_COLUMNS, SamplingMetadata


def declared_multi_step(turns: MultiStepPrograms, step: DeclaredProgram) -> list[DeclaredProgram]:
    """Returns a program for each kind of sampling; step: the declared program of one decode step."""
    table, state, _ = step.batch
    slots, submesh = state.shape[1], turns.group.submesh
    metadata = (slots, INT_COLUMNS), (slots, FLOAT_COLUMNS)
    drawn = SamplingMetadata(whole(submesh, metadata[0]), whole(submesh, metadata[1], jnp.float32))  # pyright: ignore[reportArgumentType]
    told = Slots(table, state, whole(submesh, (slots,)), whole(submesh, ()), drawn)  # pyright: ignore[reportArgumentType]
    room = step.batch_bytes + logit_bytes(turns.group.config, slots)
    return [
        replace(
            step,
            kind=f"turns {kind}",
            program=program,
            batch=(told,),
            batch_bytes=room,
            loops=(turns.most, *step.loops),
        )
        for kind, program in turns.kinds.items()
    ]
