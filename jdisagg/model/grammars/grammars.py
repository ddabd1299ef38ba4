"""What the rest of the house asks of a grammar: whether it can be had, and which tokens it allows after others.

A grammar is one text (`SamplingParams.grammar`), and where an answer stands in it is a function of that text and of the
answer's tokens: a matcher is made of the two wherever one is needed, so that nothing of it is ever sent or saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import numpy as np

from jdisagg.core.errors import ConfigError
from jdisagg.model.tokenizer import Tokenizer

BACKEND = "llguidance"


class Matcher(Protocol):
    """One answer's place in its grammar. After a token that the grammar does not allow, nothing is allowed."""

    def take(self, tokens: Sequence[int]) -> None: ...

    def fill(self, mask: np.ndarray) -> None:
        """Bit t % 32 of u32 word t // 32 is whether token t may follow."""
        ...


class Grammars(Protocol):
    """Grammars over one model's vocabulary. Called from several threads."""

    words: int  # u32 words of a mask

    def why_not(self, grammar: str) -> str:
        """Why no answer can be held to it, in one line; "" where one can. May take long."""
        ...

    def start(self, grammar: str) -> Matcher:
        """A matcher before the first token."""
        ...


def mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def grammars_installed() -> bool:
    return find_spec(BACKEND) is not None


@cache
def open_grammars(place: Path, vocab_size: int) -> Grammars:
    """For the tokenizer at `place` and a model of that vocabulary; one for each process. Raises ConfigError."""
    try:
        module = import_module("jdisagg.model.grammars.guidance")
    except ImportError as error:
        raise ConfigError(
            f"structured output needs {error.name}, which is not installed: pip install 'jdisagg[structured]' does it"
        ) from error
    return module.Guidance(Tokenizer(place), vocab_size)
