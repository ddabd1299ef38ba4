"""Sampling parameters as the rows of numbers that the device programs read; all host work, all numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from jdisagg.core.events import Sampled
from jdisagg.core.request import SamplingParams
from jdisagg.core.steps import DecodeRows, History
from jdisagg.engine.sampling import (
    BIASED,
    BIASES,
    FIRST_STOP_POSITION,
    FLOAT_COLUMNS,
    FREQUENCY,
    INT_COLUMNS,
    MIN_P,
    PRESENCE,
    REPETITION,
    SEED_HIGH,
    SEED_LOW,
    STOPS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    SamplingMetadata,
)

Put = Callable[[Any], Any]  # host arrays (a pytree) -> the same on devices
LARGEST = np.iinfo(np.int32).max


def is_plain(sampling: SamplingParams) -> bool:
    """Whether the argmax of the raw logits is the whole story."""
    holds_stops_back = sampling.min_tokens > 0 and bool(sampling.stop_token_ids)
    return sampling.greedy and not sampling.penalised and not sampling.logit_bias and not holds_stops_back


@dataclass(frozen=True, slots=True)
class Asked:
    """What the active rows of a step ask of drawing: found once for all steps of the same rows."""

    active: tuple[int, ...]
    each: list[SamplingParams]
    plain: bool  # all of them
    penalised: bool  # any of them
    wanted: list[int | None]  # logprobs
    scored: bool  # any of them

    @classmethod
    def of(cls, active: tuple[int, ...], each: list[SamplingParams]) -> Asked:
        wanted = [sampling.logprobs for sampling in each]
        plain, penalised = all(map(is_plain, each)), any(sampling.penalised for sampling in each)
        return cls(active, each, plain, penalised, wanted, any(number is not None for number in wanted))


@cache
def bare(token: int) -> Sampled:
    """One of which nothing else is asked; there are as many as the vocabulary has."""
    return Sampled(token)


class SamplingRows:
    """Host copy of the metadata of B rows; a row nobody set draws greedily and never stops."""

    def __init__(self, rows: int) -> None:
        self.ints = np.full((rows, INT_COLUMNS), -1, np.int32)
        self.floats = np.zeros((rows, FLOAT_COLUMNS), np.float32)
        self.floats[:, [TOP_P, REPETITION]] = 1.0
        self.taken: DecodeRows | None = None  # the step that they are as
        self.asked: Asked | None = None  # of the step that was asked for last
        self.adapters: np.ndarray | None = None  # i32[rows]: slots of their adapters, where they may have any

    def set(self, row: int, sampling: SamplingParams, output_start: int) -> None:
        """`output_start`: position of the sequence's first output token."""
        ints, floats = self.ints[row], self.floats[row]
        ints[:], floats[:] = -1, 0.0
        ints[TOP_K] = min(max(sampling.top_k, 0), LARGEST)  # over the vocabulary all are alike
        ints[[SEED_LOW, SEED_HIGH]] = np.array(
            [sampling.seed & 0xFFFFFFFF, sampling.seed >> 32 & 0xFFFFFFFF], np.uint32
        ).view(np.int32)
        ints[FIRST_STOP_POSITION] = output_start + sampling.min_tokens
        ints[STOPS : STOPS + len(sampling.stop_token_ids)] = sampling.stop_token_ids
        for column, (token, bias) in enumerate(sampling.logit_bias):
            ints[BIASED + column], floats[BIASES + column] = token, bias
        floats[[TEMPERATURE, TOP_P, MIN_P]] = sampling.temperature, sampling.top_p, sampling.min_p
        floats[[REPETITION, PRESENCE, FREQUENCY]] = (
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )

    def on(self, put: Put) -> SamplingMetadata:
        """Where `put` brings them; of copies, because it may adopt its buffer and these rows will be written again."""
        return SamplingMetadata(*put((self.ints.copy(), self.floats.copy())))


def history_rows(history: History, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """bool[V] of the prompt, i32[V] times in the output."""
    seen = np.zeros(vocab_size, np.bool_)
    seen[list(history.prompt)] = True
    return seen, np.bincount(np.array(history.output, np.int64), minlength=vocab_size).astype(np.int32)


def sampled_rows(
    tokens: Sequence[int], wanted: Sequence[int | None], logprobs: Sequence[np.ndarray] | None
) -> list[Sampled]:
    """Row i as a `Sampled`: bare where wanted[i] is None, else with its logprob and the wanted[i] likeliest.

    `logprobs` are the host copies of what `token_logprobs` gives for the same rows; None where nobody asked.
    """
    if logprobs is None:
        return [bare(token) for token in tokens]
    chosen, ids, values = logprobs
    return [
        Sampled(token)
        if number is None
        else Sampled(
            token,
            float(chosen[row]),
            tuple(zip(ids[row, :number].tolist(), values[row, :number].tolist(), strict=True)),
        )
        for row, (token, number) in enumerate(zip(tokens, wanted, strict=True))
    ]
