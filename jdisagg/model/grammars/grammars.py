"""What the rest of the house asks of a grammar: whether it can be had, and which tokens it allows after others.

A grammar is one text (`SamplingParams.grammar`), and where an answer stands in it is a function of that text and of the
answer's tokens: a matcher is made of the two wherever one is needed, so that nothing of it is ever sent or saved.
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
class Whitespace:
    """Between the tokens of JSON: a space, or a new line and its indent, so that nobody goes on with them for ever."""

    pattern: str = r"\x20|\r?\n[\x20\t]{0,40}"  # "": none


class Matcher(Protocol):
    """One answer's place in its grammar. After a token that the grammar does not allow, nothing is allowed."""

    def take(self, tokens: Sequence[int]) -> None: ...

    def undo(self, count: int) -> None:
        """Takes back the last tokens, all of which were allowed."""
        ...

    def forced(self) -> list[int]:
        """What must come next: of each of these, one behind the other, `fill` would allow that token alone."""
        ...

    def follows(self, tokens: Sequence[int]) -> int:
        """How many of them, one behind the other, may come next; `fill` may allow fewer, never more."""
        ...

    def fill(self, mask: np.ndarray) -> None:
        """Bit t % 32 of u32 word t // 32 is whether token t may follow."""
        ...


class Grammars(Protocol):
    """Grammars over one model's vocabulary. Called from several threads."""

    words: int  # u32 words of a mask

    def start(self, grammar: str) -> Matcher:
        """A matcher before the first token."""
        ...


class GrammarCompiler(Grammars, Protocol):
    """What makes a grammar of what a client asks for. `of_...` raise ValueError for what is none at all."""

    def why_not(self, grammar: str) -> str:
        """Why no answer can be held to it, in one line; "" where one can. May take long."""
        ...

    def of_schema(self, schema: object, whitespace: Whitespace) -> str:
        """JSON that the schema, an object or a text, takes."""
        ...

    def of_regex(self, regex: str) -> str: ...

    def of_grammar(self, text: str) -> str:
        """Of a context-free grammar, as Lark or GBNF (EBNF with `::=`) write them."""
        ...

    def of_choices(self, choices: Sequence[str]) -> str:
        """One of these texts."""
        ...


def mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def grammars_installed() -> bool:
    return find_spec(BACKEND) is not None


@cache
def open_grammars(place: Path, vocab_size: int) -> GrammarCompiler:
    """For the tokenizer at `place` and a model of that vocabulary; one for each process. Raises ConfigError."""
    try:
        module = import_module("jdisagg.model.grammars.guidance")
    except ImportError as error:
        raise ConfigError(
            f"structured output needs {error.name}, which is not installed: pip install llguidance does it"
        ) from error
    return module.Guidance(Tokenizer(place), vocab_size)
