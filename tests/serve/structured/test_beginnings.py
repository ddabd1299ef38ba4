"""What grammars force at first is what would be drawn, token by token."""

from __future__ import annotations

import numpy as np
import pytest

from jdisagg import LLM, SamplingParams
from jdisagg.model.grammars.grammars import WhitespaceFormat, open_grammars
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.serve.deploy.deployment import EMBEDDED_MODEL
from jdisagg.serve.frontends import structured

VOCAB = 4096
SCHEMA = {
    "type": "object",
    "properties": {"temperature": {"type": "integer"}, "unit": {"enum": ["celsius"]}},
    "required": ["temperature", "unit"],
    "additionalProperties": False,
}


def test_the_tokens_at_first_are_those_that_a_grammar_leaves_no_choice_about():
    grammars = open_grammars(EMBEDDED_MODEL, VOCAB)
    grammar = grammars.of_schema(SCHEMA, WhitespaceFormat(""))
    forced, matcher = structured.forced_first(grammar, EMBEDDED_MODEL, VOCAB), grammars.start(grammar)
    assert len(forced) > 2 and '{"temperature":'.startswith(Tokenizer(EMBEDDED_MODEL).decode([*forced]).strip())
    for token in forced:
        mask = np.zeros(grammars.words, np.uint32)
        matcher.fill(mask)
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist()
        assert allowed == [token]
        matcher.take([token])


def test_who_knows_no_grammars_here_forces_nothing(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise structured.ConfigError("structured output needs llguidance")

    monkeypatch.setattr(structured, "open_grammars", refuse)
    assert structured.forced_first("{}", EMBEDDED_MODEL, VOCAB) == ()


@pytest.mark.slow
def test_answers_and_their_usage_are_the_same_and_their_logprobs_are_the_models(monkeypatch: pytest.MonkeyPatch):
    asked = [
        SamplingParams(max_tokens=40, temperature=t, seed=3, structured_outputs={"json": SCHEMA}, logprobs=logprobs)
        for t, logprobs in ((0.0, None), (0.9, None), (0.9, 0))
    ]
    sizes = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64, "prefill_buckets": "64"}
    with LLM(mesh="prefill:tp1,decode:tp1", table_buckets="128", **sizes) as llm:
        with_beginning = [llm.generate("weather in Rome:", each) for each in asked]
        monkeypatch.setattr(structured, "forced_first", lambda *_: ())
        without = [llm.generate("weather in Rome:", each) for each in asked]
        assert llm.service.recompiles() == 0
    assert [each.token_ids for each in with_beginning] == [each.token_ids for each in without]
    assert [each.text for each in with_beginning] == [each.text for each in without]
    told = with_beginning[2].logprobs
    assert told is not None and len(told) == len(with_beginning[2].token_ids)
