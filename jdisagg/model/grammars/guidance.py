"""Grammars by llguidance: JSON schemas, regular expressions and Lark grammars as masks over the vocabulary."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from jdisagg.core.errors import ConfigError
from jdisagg.model.grammars.grammars import mask_words
from jdisagg.model.tokenizer import Tokenizer

log = logging.getLogger(__name__)

KEPT = 256  # grammars whose compiled form is kept; the least recently used goes first


class GuidanceMatcher:
    """Implements `Matcher`."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def take(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not self._matcher.consume_token(token):
                log.error("a grammar does not go on with token %d: %s", token, _line(self._matcher.get_error()))
                return

    def fill(self, mask: np.ndarray) -> None:
        mask[:] = 0
        if self._matcher.is_error():
            return
        fill_next_token_bitmask(self._matcher, mask.view(np.int32)[None], 0)
        if self._matcher.is_error():  # it was too much for the limits of one step
            log.error("a grammar ends its answer: %s", _line(self._matcher.get_error()))
            mask[:] = 0


class Guidance:
    """Implements `Grammars`."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Raises ConfigError where llguidance cannot take the tokenizer."""
        self.words = mask_words(vocab_size)
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = Lock()
        ends = [token for token in tokenizer.eos_ids if token < vocab_size]
        if not ends:
            raise ConfigError("structured output: the tokenizer names no token that ends an answer")
        try:
            self._tokenizer = LLTokenizer(tokenizer.as_json, n_vocab=vocab_size, eos_token=ends)
        except Exception as error:
            raise ConfigError(
                f"structured output: llguidance cannot take this tokenizer: {str(error)[:300]}"
            ) from error

    def why_not(self, grammar: str) -> str:
        matcher = self._fresh(grammar)
        if not matcher.is_error():
            GuidanceMatcher(matcher).fill(np.zeros(self.words, np.uint32))  # what only the first step finds out
        return _line(matcher.get_error()) if matcher.is_error() else ""

    def start(self, grammar: str) -> GuidanceMatcher:
        return GuidanceMatcher(self._fresh(grammar))

    def _fresh(self, grammar: str) -> LLMatcher:
        """Its own copy of the grammar's compiled form; whoever asks for one that is not kept compiles it."""
        with self._lock:
            found = self._kept.get(grammar)
            if found is not None:
                self._kept.move_to_end(grammar)
                return found.deep_copy()
        made = LLMatcher(self._tokenizer, grammar, log_level=0)
        with self._lock:
            if not made.is_error():
                self._kept[grammar] = made
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return made.deep_copy()


def _line(text: str) -> str:
    return " ".join(text.split())[:400]


def schema_grammar(schema: object, whitespace: dict[str, object]) -> str:
    """An answer that the JSON schema takes; `whitespace` is llguidance's `whitespace_flexible` or `_pattern`.

    Raises ValueError for what is no schema at all.
    """
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return LLMatcher.grammar_from_json_schema(text, overrides=whitespace)  # pyright: ignore[reportArgumentType]
