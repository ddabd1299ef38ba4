"""What form clients ask of an answer, in every spelling."""

from typing import Any

import pytest

from jdisagg.core.errors import RequestError
from jdisagg.model.grammars.grammars import WhitespaceFormat, open_grammars
from jdisagg.serve.frontends.structured import COMPACT, Form, form_of, grammar_of
from tests.serve.scripted import FIXTURE

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
GRAMMARS = open_grammars(FIXTURE, 512)
SPELLINGS: list[tuple[dict[str, Any], Form]] = [
    ({"response_format": {"type": "json_object"}}, Form("schema", {"type": "object"}, "response_format")),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
        Form("schema", SCHEMA, "response_format.json_schema.schema"),
    ),
    ({"guided_json": SCHEMA}, Form("schema", SCHEMA, "guided_json")),
    ({"guided_regex": "a+"}, Form("regex", "a+", "guided_regex")),
    ({"guided_choice": ["a", "b"]}, Form("choice", ["a", "b"], "guided_choice")),
    ({"guided_grammar": "start: /a/"}, Form("grammar", "start: /a/", "guided_grammar")),
    ({"structured_outputs": {"json": SCHEMA}}, Form("schema", SCHEMA, "structured_outputs.json")),
    ({"structured_outputs": {"regex": "a+"}}, Form("regex", "a+", "structured_outputs.regex")),
    ({"structured_outputs": {"choice": ["a"]}}, Form("choice", ["a"], "structured_outputs.choice")),
    ({"structured_outputs": {"grammar": "start: /a/"}}, Form("grammar", "start: /a/", "structured_outputs.grammar")),
    (
        {"structured_outputs": {"json_object": True}},
        Form("schema", {"type": "object"}, "structured_outputs.json_object"),
    ),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        Form("schema", SCHEMA, "structured_outputs.json", COMPACT),
    ),
    (
        {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"},
        Form("schema", SCHEMA, "guided_json", WhitespaceFormat(" ?")),
    ),
    ({"json_schema": "{}"}, Form("schema", "{}", "json_schema")),
    ({"regex": "a"}, Form("regex", "a", "regex")),
    ({"ebnf": 'root ::= "a"'}, Form("grammar", 'root ::= "a"', "ebnf")),
]


@pytest.mark.parametrize(("body", "form"), SPELLINGS, ids=[str(body)[:60] for body, _ in SPELLINGS])
def test_every_spelling_of_a_form_is_read_and_compiles(body: dict[str, Any], form: Form):
    assert form_of(body) == form
    assert grammar_of(form, GRAMMARS)


@pytest.mark.parametrize(
    "body", [{}, {"response_format": None}, {"response_format": {"type": "text"}}, {"structured_outputs": {}}]
)
def test_who_asks_for_nothing_is_free(body: dict[str, Any]):
    assert form_of(body) is None


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "guided_regex and guided_choice are given"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex", "an answer has one form"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "is not supported"),
    ({"response_format": {"type": "xml"}}, "response_format", "'xml'"),
    ({"response_format": {"schema": {}}}, "response_format", "None"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "no json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, "response_format", "is 3, must be"),
    ({"guided_json": {"$ref": "#/$defs/x"}}, "guided_json", "Pointer '/$defs/x' does not exist"),
    ({"guided_json": "{"}, "guided_json", "EOF"),
    ({"guided_json": "[]"}, "guided_json", "guided_json"),
    ({"guided_regex": "("}, "guided_regex", "unclosed group"),
    ({"guided_regex": ""}, "guided_regex", "must be a text"),
    ({"guided_choice": []}, "guided_choice", "a list of 0"),
    ({"guided_choice": ["a", 3]}, "guided_choice", "3"),
    ({"guided_grammar": 'start: "a" foo'}, "guided_grammar", 'unknown name: "foo"'),
    ({"ebnf": "root ::= ("}, "ebnf", "GBNF"),
    ({"guided_choice": ["x" * 300_000]}, "guided_choice", "at most 262144"),
]


@pytest.mark.parametrize(("body", "param", "says"), WRONG, ids=[f"{param}: {says}" for _, param, says in WRONG])
def test_what_is_no_form_is_refused_by_name(body: dict[str, Any], param: str, says: str):
    with pytest.raises(RequestError) as caught:
        form = form_of(body)
        assert form is not None
        grammar_of(form, GRAMMARS)
    assert str(caught.value.param).startswith(param)
    assert says in str(caught.value) and "\n" not in str(caught.value)
