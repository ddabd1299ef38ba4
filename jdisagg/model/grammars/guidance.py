"""Grammars by llguidance: JSON schemas, regular expressions and Lark grammars as masks over the vocabulary."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from llguidance.numpy import fill_next_token_bitmask

from jdisagg.core.errors import ConfigError
from jdisagg.model.grammars.grammars import WhitespaceFormat, mask_words
from jdisagg.model.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# The time of an ambiguous grammar's mask grows with the square of a row's items (43 ms for 2000, 3 ms for 500); an
# optional property of an object takes four items. Verbose errors are off because they are logged and contain client
# grammars.
OF_SCHEMAS = LLParserLimits(max_items_in_row=2000, verbose_errors=False)
OF_OTHERS = LLParserLimits(max_items_in_row=500, verbose_errors=False)
SCHEMA = '{"grammars":[{"name":"json_schema",'  # as `grammar_from_json_schema` begins
NO_TOKEN = "NoExtensionBias"  # llguidance's error for a state where no token may follow
KEPT = 256  # compiled grammars in the LRU cache


class GuidanceState:
    """A matcher of one answer by llguidance; implements `Matcher`."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def take(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not self._matcher.consume_token(token):
                log.error("a grammar does not go on with token %d: %s", token, _line(self._matcher.get_error()))
                return

    def undo(self, count: int) -> None:
        if count:
            self._matcher.rollback(count)

    def forced(self) -> list[int]:
        return [] if self._matcher.is_error() else self._matcher.compute_ff_tokens()

    def follows(self, tokens: Sequence[int]) -> int:
        return 0 if self._matcher.is_error() else self._matcher.validate_tokens([*tokens])

    def fill(self, mask: np.ndarray) -> None:
        mask[:] = 0
        if self._matcher.is_error():
            return
        fill_next_token_bitmask(self._matcher, mask.view(np.int32)[None], 0)
        if self._matcher.is_error():  # the limits of one step were exceeded
            log.error("a grammar ends its answer: %s", _line(self._matcher.get_error()))
            mask[:] = 0


class GuidanceBuilder:
    """A grammar compiler by llguidance; implements `GrammarCompiler`."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Raises ConfigError if llguidance does not accept the tokenizer."""
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
        with self._lock:
            if grammar in self._kept:
                return ""
        matcher = self._compile(grammar)
        mask = np.zeros(self.words, np.uint32)
        if not matcher.is_error():
            fill_next_token_bitmask(matcher, mask.view(np.int32)[None], 0)  # some errors appear only in the first step
            if NO_TOKEN in matcher.get_error() or not (mask.any() or matcher.is_error()):
                return "there is no answer that it takes"
        if matcher.is_error():
            return _line(matcher.get_error())
        self._store(grammar, matcher)
        return ""

    def start(self, grammar: str) -> GuidanceState:
        with self._lock:
            found = self._kept.get(grammar)
            if found is not None:
                self._kept.move_to_end(grammar)
                return GuidanceState(found.deep_copy())
        made = self._compile(grammar)
        self._store(grammar, made.deep_copy())
        return GuidanceState(made)

    def _compile(self, grammar: str) -> LLMatcher:
        limits = OF_SCHEMAS if grammar.startswith(SCHEMA) else OF_OTHERS
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)

    def _store(self, grammar: str, matcher: LLMatcher) -> None:
        with self._lock:
            self._kept[grammar] = matcher
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)

    def of_schema(self, schema: object, whitespace: WhitespaceFormat) -> str:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        options: Any = (
            {"whitespace_pattern": whitespace.pattern} if whitespace.pattern else {"whitespace_flexible": False}
        )
        return LLMatcher.grammar_from_json_schema(text, overrides=options)

    def of_regex(self, regex: str) -> str:
        return LLMatcher.grammar_from_regex(regex)

    def of_grammar(self, text: str) -> str:
        return grammar_from("grammar", text)

    def of_choices(self, choices: Sequence[str]) -> str:
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices)))


def _line(text: str) -> str:
    return " ".join(text.split())[:400]
