"""A call that must be made, as a schema that both the grammar and a validator take."""

import json

import jsonschema
import pytest

from jdisagg.model.grammars.grammars import open_grammars
from jdisagg.serve.frontends.structured import grammar_of
from jdisagg.serve.frontends.tools.asked import ForcedReader, form_of_choice, tools_of
from tests.serve.scripted import FIXTURE

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
DRAW = {"$defs": {"p": POINT}, "type": "object", "properties": {"at": {"$ref": "#/$defs/p"}}, "required": ["at"]}
TOOLS = [
    {"type": "function", "function": {"name": "draw", "parameters": DRAW}},
    {"type": "function", "function": {"name": "clear"}},
]


def test_a_tools_own_definitions_are_found_from_the_root():
    tools = tools_of({"tools": TOOLS, "tool_choice": "required"})
    assert tools is not None
    form = form_of_choice(tools)
    assert form is not None and grammar_of(form, open_grammars(FIXTURE, 512))
    jsonschema.validate([{"name": "draw", "parameters": {"at": {"x": 3}}}], form.what)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate([{"name": "draw", "parameters": {"at": {"x": "3"}}}], form.what)


@pytest.mark.parametrize("parallel", [True, False])
def test_one_call_at_a_time_where_that_is_asked_for(parallel: bool):
    tools = tools_of({"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": parallel})
    assert tools is not None
    form = form_of_choice(tools)
    assert form is not None and form.what.get("maxItems") == (None if parallel else 1)


def test_what_was_cut_short_is_shown_and_calls_nothing():
    tools = tools_of({"tools": TOOLS, "tool_choice": "required"})
    assert tools is not None
    text = json.dumps([{"name": "clear", "parameters": {}}])
    whole, half = ForcedReader(tools), ForcedReader(tools)
    whole.feed(text)
    half.feed(text[:-3])
    assert [call.name for call in whole.end(True).calls] == ["clear"]
    assert half.end(False).calls == ()
