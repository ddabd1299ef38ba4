"""Arguments that stand as texts between marks are what their tool's schema says."""

from typing import Any

import pytest

from jdisagg.serve.frontends.tools.calls import properties_of, typed, types_of
from jdisagg.serve.frontends.tools.parser import Call
from jdisagg.serve.frontends.tools.syntaxes import DSML, GLM, QWEN, Marked

CASES: list[tuple[str, Any, Any]] = [
    ("0042", {"type": "string"}, "0042"),
    ("0042", {"type": "integer"}, "0042"),
    ("42", {"type": "integer"}, 42),
    ("42", None, 42),
    ("plain", None, "plain"),
    ("True", {"type": "boolean"}, True),
    ("null", {"type": ["string", "null"]}, None),
    ("null", {"type": "string"}, "null"),
    ("gym", {"type": ["string", "null"]}, "gym"),
    ("7", {"type": ["string", "null"]}, "7"),
    ("7", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, 7),
    ("true", {"type": ["string", "integer"]}, "true"),
    (' {"a": [1]} ', {"type": "object"}, {"a": [1]}),
    ("[1, 2", {"type": "array"}, "[1, 2"),
    ("NaN", {"type": "number"}, "NaN"),
    ("1e999", {"type": "number"}, "1e999"),
]


@pytest.mark.parametrize(("text", "schema", "value"), CASES)
def test_an_argument_is_what_its_schema_says_of_its_text(text: str, schema: Any, value: Any):
    found = typed(text, schema)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("schema", [3, [], {"type": 3}, {"type": [3, {}]}, {"type": {}}, {"anyOf": {}}, {"anyOf": [3]}])
def test_a_schema_that_says_nothing_asks_nothing(schema: Any):
    assert types_of(schema) == set()


def test_a_tool_that_nobody_offered_has_no_schemas():
    assert not properties_of({"a": {"properties": 3}, "b": None}, "a") and not properties_of({"b": None}, "b")
    assert not properties_of({}, "c")


@pytest.mark.parametrize(
    ("style", "text", "content"),
    [
        (QWEN, "<tool_call>maybe", "<tool_call>"),
        (QWEN, "<function=f>\nno argument", "<function=f>\n"),
        (GLM, '<tool_call>{"name": "f"}', "<"),
        (DSML, "<｜DSML｜other>", "<"),
    ],
)
def test_what_only_begins_like_a_call_is_content(style: Any, text: str, content: str):
    section = Marked(style, {}).read(text, False)
    assert section is not None and not section.calls and text.startswith(section.content) and section.content


def test_a_call_of_a_tool_that_nobody_offered_is_told_as_the_model_wrote_it():
    text = "<function=f>\n<parameter=x>\n3\n</parameter>\n<parameter=y>\nlo\n</parameter>\n</function>"
    section = Marked(QWEN, {}).read(text, False)
    assert section is not None and section.calls == (Call("f", '{"x": 3, "y": "lo"}'),)
