"""Grammars by llguidance over the embedded model's vocabulary."""

import json
import time
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jdisagg
from jdisagg.model.grammars.grammars import WhitespaceFormat, open_grammars
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.serve.frontends.structured import MOST_OPTIONAL

EMBEDDED_MODEL = Path(jdisagg.__file__).parent / "embedded"
VOCAB = 4096
COMPACT = WhitespaceFormat("")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 199},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
GRAMMARS = open_grammars(EMBEDDED_MODEL, VOCAB)
TOKENIZER = Tokenizer(EMBEDDED_MODEL)
LIST = GRAMMARS.of_schema({"type": "array", "items": {"type": "null"}}, WhitespaceFormat())


def mask_after(grammar: str, tokens: list[int]) -> np.ndarray:
    """bool[V]."""
    matcher, mask = GRAMMARS.start(grammar), np.zeros(GRAMMARS.words, np.uint32)
    matcher.take(tokens)
    matcher.fill(mask)
    return np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB].astype(bool)


def walk(grammar: str, seed: int, most: int = 400) -> list[int]:
    """Tokens drawn with all that are allowed alike, up to the one that ends the answer."""
    generator, matcher, mask = np.random.default_rng(seed), GRAMMARS.start(grammar), np.zeros(GRAMMARS.words, np.uint32)
    drawn = list[int]()
    while len(drawn) < most and not (drawn and drawn[-1] in TOKENIZER.eos_ids):
        matcher.take(drawn[-1:])
        matcher.fill(mask)
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]
        drawn.append(int(generator.choice(allowed)))
    return drawn


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1 << 20))
def test_whatever_is_drawn_under_the_mask_is_what_the_schema_takes(seed: int):
    drawn = walk(GRAMMARS.of_schema(PERSON, COMPACT), seed)
    assert drawn[-1] in TOKENIZER.eos_ids
    assert jsonschema.Draft202012Validator(PERSON).is_valid(json.loads(TOKENIZER.decode(drawn)))


def test_a_matcher_made_of_the_tokens_so_far_is_where_one_that_took_them_one_by_one_is():
    grammar = GRAMMARS.of_schema(PERSON, COMPACT)
    drawn = walk(grammar, 7)
    for cut in range(len(drawn)):
        assert mask_after(grammar, drawn[:cut])[drawn[cut]]


HELD = {
    "compact": GRAMMARS.of_schema(PERSON, COMPACT),
    "spaced": GRAMMARS.of_schema(PERSON, WhitespaceFormat()),
    "regex": GRAMMARS.of_regex(r"(return|retained) x{3,40}( is not None)?;"),
    "lark": GRAMMARS.of_grammar('start: "def main(" (/[a-z]+/ ": int, ")* ")" " -> None:"'),
}


@pytest.mark.parametrize("name", HELD)
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 1 << 20), data=st.data())
def test_forced_tokens_are_those_that_the_mask_alone_would_have_left(name: str, seed: int, data: st.DataObject):
    drawn = walk(HELD[name], seed, most=60)
    cut = data.draw(st.integers(0, len(drawn)))
    matcher = GRAMMARS.start(HELD[name])
    matcher.take(drawn[:cut])
    so_far = drawn[:cut]
    for token in matcher.forced():
        assert mask_after(HELD[name], so_far).nonzero()[0].tolist() == [token]
        so_far.append(token)


@pytest.mark.parametrize("name", HELD)
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 1 << 20), data=st.data())
def test_a_matcher_that_takes_tokens_back_is_where_it_was(name: str, seed: int, data: st.DataObject):
    drawn = walk(HELD[name], seed, most=60)
    cut = data.draw(st.integers(0, len(drawn)))
    ahead = [token for token in drawn[cut : cut + 5] if token not in TOKENIZER.eos_ids]
    matcher, mask = GRAMMARS.start(HELD[name]), np.zeros(GRAMMARS.words, np.uint32)
    matcher.take(drawn[:cut])
    assert matcher.follows([*ahead, 0]) >= len(ahead)
    matcher.take(ahead)
    matcher.fill(mask)
    matcher.undo(len(ahead))
    matcher.fill(mask)
    assert np.array_equal(
        np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB], mask_after(HELD[name], drawn[:cut])
    )


def test_compact_json_forces_most_of_what_is_not_its_values():
    matcher, most = GRAMMARS.start(HELD["compact"]), list[int]()
    most = matcher.forced()
    assert TOKENIZER.decode(most) == '{"name":'
    assert matcher.forced() == most, "to ask changes nothing"


def test_an_answer_ends_where_its_grammar_does_and_nowhere_before():
    grammar = GRAMMARS.of_schema(PERSON, COMPACT)
    drawn = walk(grammar, 3)
    ends = [mask_after(grammar, drawn[:cut])[list(TOKENIZER.eos_ids)].any() for cut in range(len(drawn))]
    assert ends == [False] * (len(drawn) - 1) + [True]


def test_after_a_token_that_is_not_allowed_nothing_is():
    assert not mask_after(GRAMMARS.of_schema(PERSON, COMPACT), TOKENIZER.encode("[", False)).any()


def test_tokens_past_the_tokenizers_own_are_never_drawn():
    wide = open_grammars(EMBEDDED_MODEL, VOCAB + 70)
    matcher, mask = wide.start("start: /(.|\\n)*/"), np.zeros(wide.words, np.uint32)
    matcher.fill(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert wide.words == -(-(VOCAB + 70) // 32) and bits[:VOCAB].any() and not bits[VOCAB:].any()


BROKEN = [
    ('{"$ref": "#/$defs/x"}', "Pointer '/$defs/x' does not exist"),
    ('{"type": "foo"}', "Invalid type: foo"),
    ('{"type": "string", "pattern": "("}', "unclosed group"),
    ('{"type": "string", "minLength": 5, "maxLength": 1}', "minLength (5) is greater than maxLength (1)"),
]


@pytest.mark.parametrize(("schema", "says"), BROKEN, ids=[says for _, says in BROKEN])
def test_a_schema_that_cannot_be_compiled_is_named(schema: str, says: str):
    found = GRAMMARS.why_not(GRAMMARS.of_schema(schema, COMPACT))
    assert says in found and "\n" not in found


NOTHING = {"type": "string", "pattern": "^a$", "minLength": 2}


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (GRAMMARS.of_schema(NOTHING, COMPACT), "Unsatisfiable"),
        (GRAMMARS.of_grammar("start: /[^\\s\\S]/"), "there is no answer that it takes"),
    ],
)
def test_what_takes_nothing_is_refused(grammar: str, says: str, caplog: pytest.LogCaptureFixture):
    assert says in GRAMMARS.why_not(grammar) and not caplog.records


def test_a_grammar_that_explodes_is_refused_and_takes_no_time():
    began = time.monotonic()
    parts = [[{"type": "object", "properties": {f"k{n}": {"const": m}}} for m in range(6)] for n in range(8)]
    found = GRAMMARS.why_not(GRAMMARS.of_schema({"allOf": [{"anyOf": each} for each in parts]}, COMPACT))
    assert "too large" in found and time.monotonic() - began < 20


def test_an_object_of_as_many_optional_properties_as_are_allowed_can_be_written():
    wide = {"type": "object", "properties": {f"p{n}": {"type": "null"} for n in range(MOST_OPTIONAL)}}
    assert len(walk(GRAMMARS.of_schema({**wide, "additionalProperties": False}, COMPACT), 1)) > 1


def test_an_ambiguous_grammar_ends_its_answer_before_its_masks_take_long():
    matcher, mask = GRAMMARS.start(GRAMMARS.of_grammar('start: e\ne: e e | "a" | e "a" e |')), np.zeros(128, np.uint32)
    worst_s, tokens = 0.0, TOKENIZER.encode("a", False)
    for _ in range(300):
        began_s = time.thread_time()
        matcher.take(tokens)
        matcher.fill(mask)
        worst_s = max(worst_s, time.thread_time() - began_s)
    assert not mask.any() and worst_s < 0.1


def test_a_grammar_that_goes_is_not_refused():
    assert GRAMMARS.why_not(GRAMMARS.of_schema(PERSON, COMPACT)) == ""


@pytest.mark.parametrize("text", ['start: "x" ("," "x")*', 'root ::= "x" ("," "x")*'], ids=["lark", "gbnf"])
def test_a_grammar_may_be_written_in_either_way(text: str):
    answer = TOKENIZER.decode(walk(GRAMMARS.of_grammar(text), 5))
    assert set(answer) <= set("x,") and answer.startswith("x") and ",," not in answer


def test_a_choice_is_one_of_the_texts_whatever_they_hold():
    texts = ['say "hi"', "a\\b\n", "ä/€"]
    found = {TOKENIZER.decode(walk(GRAMMARS.of_choices(texts), seed)) for seed in range(12)}
    assert found == set(texts)


@pytest.mark.parametrize("text", ["[ null,\n\tnull ]", "[\n" + " " * 40 + "null\r\n]"])
def test_json_may_be_written_over_several_lines(text: str):
    assert mask_after(LIST, TOKENIZER.encode(text, False))[list(TOKENIZER.eos_ids)].any()


@pytest.mark.parametrize("text", ["[  ", "[\n\n", "[\n" + " " * 41])
def test_whitespace_between_the_parts_of_json_comes_to_an_end(text: str):
    assert not mask_after(LIST, TOKENIZER.encode(text, False)).any()
