"""The interface of grammars for structured output: availability, and the tokens allowed after others.

A grammar is one text (`SamplingParams.grammar`). The state of an answer is a function of that text and of the answer's
tokens, so a matcher is built from the two where needed and is never sent or saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import numpy as np

from jdisagg.core.errors import ConfigError
from jdisagg.model.tokenizer import Tokenizer

BACKEND = "llguidance"


@dataclass(frozen=True, slots=True)
class WhitespaceFormat:
    """The whitespace allowed between JSON tokens: a space, or a new line with bounded indentation, so that a model
    cannot emit whitespace for ever."""

    pattern: str = r"\x20|\r?\n[\x20\t]{0,40}"  # "": none


class GrammarState(Protocol):
    """The grammar state of one answer. After a token that the grammar does not allow, nothing is allowed."""

    def take(self, tokens: Sequence[int]) -> None: ...

    def undo(self, count: int) -> None:
        """Takes back the last tokens, all of which were allowed."""
        ...

    def forced(self) -> list[int]:
        """Returns the tokens that must come next; at each of them `fill` would allow that token alone."""
        ...

    def follows(self, tokens: Sequence[int]) -> int:
        """Returns how many of `tokens`, in order, may come next; `fill` may allow fewer, never more."""
        ...

    def fill(self, mask: np.ndarray) -> None:
        """Writes the mask: bit t % 32 of u32 word t // 32 is 1 if token t may follow."""
        ...


class CompiledGrammars(Protocol):
    """Compiled grammars over one model's vocabulary; called from several threads."""

    words: int  # u32 words of a mask

    def start(self, grammar: str) -> GrammarState:
        """Returns a matcher before the first token."""
        ...


class GrammarBuilder(CompiledGrammars, Protocol):
    """Compiler of client requests to grammars. The `of_...` methods raise ValueError for invalid input."""

    def why_not(self, grammar: str) -> str:
        """Returns why no answer can match the grammar, in one line; "" if one can. May take long."""
        ...

    def of_schema(self, schema: object, whitespace: WhitespaceFormat) -> str:
        """Returns a grammar of the JSON values that a JSON schema (object or text) accepts."""
        ...

    def of_regex(self, regex: str) -> str: ...

    def of_grammar(self, text: str) -> str:
        """Returns a grammar from context-free rules in Lark or GBNF (EBNF with `::=`)."""
        ...

    def of_choices(self, choices: Sequence[str]) -> str:
        """Returns a grammar that accepts one of these texts."""
        ...


def mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def grammars_installed() -> bool:
    return find_spec(BACKEND) is not None


@cache
def open_grammars(place: Path, vocab_size: int) -> GrammarBuilder:
    """Returns the process-wide compiler for the tokenizer at `place` and a vocabulary size. Raises ConfigError."""
    try:
        module = import_module("jdisagg.model.grammars.guidance")
    except ImportError as error:
        raise ConfigError(
            f"structured output needs {error.name}, which is not installed: pip install llguidance does it"
        ) from error
    return module.GuidanceBuilder(Tokenizer(place), vocab_size)
