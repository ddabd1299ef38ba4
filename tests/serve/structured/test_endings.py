"""Who ended an answer, its grammar or its model, is found out from its tokens."""

from __future__ import annotations

import pytest

from benchmarks.exploding import AMBIGUITY
from jdisagg.core.errors import ConfigError
from jdisagg.model.grammars.grammars import open_grammars
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.serve.deploy.deployment import EMBEDDED_MODEL
from jdisagg.serve.frontends import structured

VOCAB = 4096


def test_a_grammar_that_goes_on_did_not_end_the_answer_and_one_over_its_limits_did(monkeypatch: pytest.MonkeyPatch):
    grammar, (a,) = (
        open_grammars(EMBEDDED_MODEL, VOCAB).of_grammar(AMBIGUITY),
        Tokenizer(EMBEDDED_MODEL).encode("a", False),
    )
    assert not structured.nothing_follows(grammar, [], EMBEDDED_MODEL, VOCAB)
    assert not structured.nothing_follows(grammar, [a] * 20, EMBEDDED_MODEL, VOCAB)
    assert structured.nothing_follows(grammar, [a] * 200, EMBEDDED_MODEL, VOCAB)

    def refuse(*_: object) -> None:
        raise ConfigError("structured output needs llguidance")

    monkeypatch.setattr(structured, "open_grammars", refuse)
    assert not structured.nothing_follows(grammar, [a] * 200, EMBEDDED_MODEL, VOCAB)
