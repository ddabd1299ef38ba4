"""Which tokens are trained on at which step: a pure function of the step number, so a resumed run sees the same."""

from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from jdisagg.core.errors import ConfigError
from jdisagg.training.corpus import Document, lessons
from jdisagg.training.tokenizer import END_OF_TEXT, as_chat


@dataclass(frozen=True, slots=True)
class Phase:
    """A run of steps with sequences of one length. Early phases are short (cheap), the last one reaches the context."""

    steps: int
    length_tokens: int
    batch: int  # sequences a step

    @property
    def step_tokens(self) -> int:
        return self.length_tokens * self.batch


def token_stream(documents: tuple[Document, ...], tokenizer: Tokenizer, lesson_share: float, seed: int) -> np.ndarray:
    """u16[N]: the documents in a seeded order, each behind its <|endoftext|>, with chat lessons strewn in between.

    `lesson_share` is the share of all documented short functions that is told a second time as a chat.
    """
    rng = np.random.default_rng(seed)
    taught = [lesson for document in documents for lesson in lessons(document)]
    chosen = [as_chat(lesson) for lesson in taught if rng.random() < lesson_share]
    texts = [document.text for document in documents] + chosen
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    encoded = tokenizer.encode_batch([texts[index] for index in rng.permutation(len(texts))])
    return np.concatenate([np.asarray([end_of_text, *item.ids], np.uint16) for item in encoded])


def batch_at(stream: np.ndarray, phases: tuple[Phase, ...], seed: int, step: int) -> np.ndarray:
    """i32[batch, length + 1]: the sequences of `step` (counted from 0) with their next tokens.

    Every phase goes over the stream in epochs of shuffled windows without repetition; each epoch starts its first
    window elsewhere, so the cuts between windows move.
    """
    index, first = phase_at(phases, step)
    phase = phases[index]
    windows = (len(stream) - 1 - phase.length_tokens) // phase.length_tokens
    if windows < phase.batch:
        raise ConfigError(f"{len(stream)} training tokens hold {windows} windows of {phase.length_tokens} tokens;"
                          f" a batch takes {phase.batch}")  # fmt: skip
    epoch, row = divmod(step - first, windows // phase.batch)
    rng = np.random.default_rng([seed, index, epoch])
    offset = rng.integers(phase.length_tokens)
    order = rng.permutation(windows)[row * phase.batch : (row + 1) * phase.batch]
    starts = offset + order * phase.length_tokens
    return stream[starts[:, None] + np.arange(phase.length_tokens + 1)].astype(np.int32)


def phase_at(phases: tuple[Phase, ...], step: int) -> tuple[int, int]:
    """The index of the phase that holds `step`, and that phase's first step."""
    first = 0
    for index, phase in enumerate(phases):
        if step < first + phase.steps:
            return index, first
        first += phase.steps
    raise ConfigError(f"step {step} lies behind the last phase, which ends at {first}")


def total_steps(phases: tuple[Phase, ...]) -> int:
    return sum(phase.steps for phase in phases)


def tokens_before(phases: tuple[Phase, ...], step: int) -> int:
    """Tokens trained on in the steps before `step`."""
    seen = 0
    for phase in phases:
        taken = min(step, phase.steps)
        seen, step = seen + taken * phase.step_tokens, step - taken
    return seen
