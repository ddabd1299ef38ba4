"""Declared programs that sample tokens from logits: those after chunks and those after decode rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from jax.typing import DTypeLike

from jdisagg.core.model_config import ModelConfig
from jdisagg.engine.declaration import DeclaredProgram, local_bytes, logit_bytes
from jdisagg.engine.decode import DrawPrograms
from jdisagg.engine.prefill import FirstDrawPrograms
from jdisagg.engine.sampling import FLOAT_COLUMNS, INT_COLUMNS, SamplingTensors, TokenCounters
from jdisagg.model.grammars.grammars import mask_words
from jdisagg.parallel.submesh import Device, Program, StageMesh


@dataclass(frozen=True)
class SamplingShapes:
    """The inputs of sampling, and the one device that samples: the first of the last stage."""

    model: ModelConfig
    stage: int
    device: Device
    rows: int

    def of(self, shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(self.device))

    def ints(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self.of(shape, jnp.int32)

    @property
    def logits(self) -> Any:
        return self.of((self.rows, self.model.vocab_size), jnp.float32)

    @property
    def metadata(self) -> Any:
        return SamplingTensors(self.ints(self.rows, INT_COLUMNS), self.of((self.rows, FLOAT_COLUMNS), jnp.float32))  # pyright: ignore[reportArgumentType]

    @property
    def masks(self) -> Any:
        return self.of((self.rows, mask_words(self.model.vocab_size)), jnp.uint32)

    @property
    def counts(self) -> Any:
        shape = (self.rows, self.model.vocab_size)
        return TokenCounters(self.of(shape, jnp.bool_), self.of(shape, jnp.int32))  # pyright: ignore[reportArgumentType]

    def program(self, kind: str, program: Program, batch: tuple, donated: int = 0) -> DeclaredProgram:
        room, submesh = logit_bytes(self.model, self.rows), StageMesh([self.device])
        return DeclaredProgram(
            kind, self.stage, self.rows, program, batch, submesh, batch_bytes=room, donated_bytes=donated
        )


def declared_first_draws(programs: FirstDrawPrograms, drawn: SamplingShapes) -> list[DeclaredProgram]:
    positions = drawn.ints(drawn.rows)
    return [
        drawn.program("draw first greedy", programs.greedy, (drawn.logits,)),
        drawn.program("draw first", programs.pick, (drawn.logits, drawn.metadata, drawn.counts, positions)),
        drawn.program("draw first logprobs", programs.logprobs, (drawn.logits, positions)),
        drawn.program("draw first mask", programs.mask, (drawn.logits, drawn.masks)),
    ]


def declared_draws(programs: DrawPrograms, drawn: SamplingShapes) -> list[DeclaredProgram]:
    state, tokens, vocab_size = drawn.ints(4, drawn.rows), drawn.ints(drawn.rows), drawn.model.vocab_size
    row = drawn.ints(), drawn.of((vocab_size,), jnp.bool_), drawn.ints(vocab_size)
    output, both = local_bytes(drawn.counts.output), sum(map(local_bytes, drawn.counts))
    return [
        drawn.program("draw steer", programs.steer, (state, state)),
        drawn.program("draw greedy", programs.draw_greedy, (drawn.logits, state, drawn.metadata)),
        drawn.program("draw", programs.draw, (drawn.logits, state, drawn.metadata, drawn.counts)),
        drawn.program("draw logprobs", programs.logprobs, (drawn.logits, tokens)),
        drawn.program("draw mask", programs.mask, (drawn.logits, drawn.masks)),
        drawn.program("draw count", programs.count, (drawn.counts, tokens), output),
        drawn.program("draw set row", programs.set_row, (drawn.counts, *row), both),
    ]
