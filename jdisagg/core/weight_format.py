"""What the numbers of a model's matrices are: one value that loading, programs, identities and pages' budgets share."""

from __future__ import annotations

from dataclasses import dataclass

AS_ACTIVATIONS = "dtype"  # matrices hold what --dtype says
SCALED = ("int8", "fp8")  # one scale an output channel, activations rounded a token at a time
# The expert of all tokens is never scaled, as the others are not: its shards' sums are added with theirs, and each
# shard would round a token by the scale of its own channels alone.
SHARED = ".mlp.shared."
NAMES = (AS_ACTIVATIONS, "float32", "bfloat16", *SCALED)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One of "dtype", "float32", "bfloat16", "int8" and "fp8" for all matrices but those of `full`.

    Experts are never scaled: theirs hold what activations do in place of int8 and fp8.
    """

    dtype: str = AS_ACTIVATIONS
    full: frozenset[str] = frozenset()  # as "11.mlp.down": a layer of the model and its matrix

    @property
    def is_scaled(self) -> bool:
        return self.dtype in SCALED

    def of(self, matrix: str) -> str:
        """The dtype of one matrix, named as those of `full`, or "head"."""
        return AS_ACTIVATIONS if matrix in self.full or (self.is_scaled and SHARED in matrix) else self.dtype

    @property
    def of_experts(self) -> str:
        """The dtype of experts' matrices."""
        return AS_ACTIVATIONS if self.is_scaled else self.dtype

    def __str__(self) -> str:
        return self.dtype + (f" but for {len(self.full)} matrices" if self.full else "")


AS_MADE = WeightFormat()
