"""What follows a chunk's last layer, declared: logits of some rows, those of all of a prompt's, and states."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
from jax.typing import DTypeLike

from jdisagg.core.worker_config import WorkerConfig
from jdisagg.engine.declaration import DeclaredProgram, abstract, local_bytes, logit_bytes, whole
from jdisagg.engine.layer_group import SCORE_ROWS, LayerGroupPrograms
from jdisagg.model.network import blocks_of
from jdisagg.model.products import TILE_ROWS


def declared_heads(
    config: WorkerConfig, last: LayerGroupPrograms, stage: int, tokens: int, dtype: DTypeLike
) -> Iterator[DeclaredProgram]:
    """Of the last layer group of a worker that computes prompts, beside chunks of so many tokens."""
    model, sequences, weights = last.config, config.max_chunk_seqs, abstract(last.params.leaves)
    submesh = last.submesh
    x = whole(submesh, (tokens, model.hidden_size), dtype)
    ends = [("head", last.head_program, sequences)]
    if config.role.prefills:  # a decode worker computes the ends of prompts, and scores none
        ends.append(("score", last.score_program, tokens))
    for kind, program, rows in ends:
        room = 2 * local_bytes(x) + logit_bytes(model, min(rows, max(sequences, SCORE_ROWS)))
        what, batch = (kind, stage, tokens, program), (x, whole(submesh, (rows,)))
        gathers = gathers_of(last)
        yield DeclaredProgram(*what, batch, submesh, weights=weights, batch_bytes=room, collectives=gathers)
    if config.embeds and config.role.prefills:
        what, batch = ("states", stage, tokens, last.pool_program), (x, whole(submesh, (2, sequences)))
        room = 6 * local_bytes(whole(submesh, x.shape, jnp.float32))  # states, and three parts of each
        yield DeclaredProgram(*what, batch, submesh, weights=weights, batch_bytes=room)


def gathers_of(group: LayerGroupPrograms) -> dict[str, int]:
    """The head's logits, gathered where the vocabulary is split."""
    shards, vocab_size = group.submesh.tp, group.config.vocab_size
    if shards == 1 or vocab_size % shards:
        return {}
    return {"all-gather": blocks_of(vocab_size // shards, group.submesh.devices[0].platform)}


def scored_bytes(group: LayerGroupPrograms, rows: int) -> int:
    """Of the logits of a step that makes them: with the rows that fill up a product's tiles, and where the vocabulary
    is split as each shard makes them, as they are gathered, and in order."""
    copies = 3 if gathers_of(group) else 1
    return copies * (rows + 2 * TILE_ROWS) * group.config.vocab_size * 4
