"""Schemas as clients write them: read as the standard has it, and the part at fault is named."""

from typing import Any

import pytest

from jdisagg.core.errors import RequestError
from jdisagg.model.grammars.grammars import open_grammars
from jdisagg.serve.frontends.structured import Form, as_the_standard_has_it, at_fault, grammar_of, parts_of
from tests.serve.scripted import FIXTURE

GRAMMARS = open_grammars(FIXTURE, 512)
UNIQUE = {"type": "array", "uniqueItems": True}
AT_FAULT: list[tuple[Any, str]] = [
    ({"type": "object", "properties": {"tags": UNIQUE}}, "/properties/tags"),
    ({"anyOf": [{"type": "null"}, {"type": "array", "items": UNIQUE}]}, "/anyOf/1/items"),
    ({"$defs": {"a/b": UNIQUE}, "items": {"$ref": "#/$defs/a~1b"}, "type": "array"}, "/$defs/a~1b"),
    ({"type": "object", "properties": {"x": {"type": "foo"}, "y": {}}}, "/properties/x"),
    (UNIQUE, ""),
]


@pytest.mark.parametrize(("schema", "where"), AT_FAULT, ids=[where for _, where in AT_FAULT])
def test_the_part_of_a_schema_that_cannot_be_compiled_is_pointed_at(schema: Any, where: str):
    with pytest.raises(RequestError) as caught:
        grammar_of(Form("schema", schema, "guided_json"), GRAMMARS)
    assert (f"guided_json at #{where} cannot" if where else "guided_json cannot") in str(caught.value)


def test_what_only_the_whole_is_at_fault_for_is_pointed_at_nowhere():
    schema = {"allOf": [{"type": "string"}, {"type": "integer"}]}
    assert at_fault(schema, "too strict", lambda part: "too strict" if part is schema else "") == ""


def test_a_search_for_what_is_at_fault_comes_to_an_end():
    tries = list[Any]()
    wide = {"properties": {f"p{n}": {"description": "x" * 1000} for n in range(5000)}}
    assert at_fault(wide, "why", lambda part: tries.append(part) or "another") == ""
    assert len(tries) < 300


@pytest.mark.parametrize(("number", "required", "says"), [(1001, 1001, "1001 properties"), (481, 0, "481 optional")])
def test_an_object_of_too_many_properties_is_refused_before_it_is_compiled(number: int, required: int, says: str):
    names = [f"p{n}" for n in range(number)]
    wide = {"items": {"type": "object", "properties": {name: {} for name in names}, "required": names[:required]}}
    with pytest.raises(RequestError, match=f"guided_json has an object of {says}"):
        grammar_of(Form("schema", wide, "guided_json"), GRAMMARS)


def test_what_the_standard_takes_alike_is_read_alike():
    strange = {
        "type": "object",
        "properties": {"format": True, "n": {"minLength": 2.0, "format": "password", "type": "string"}},
        "const": {"format": "password"},
        "items": [{"format": "date"}, {"maxItems": 1.5}],
    }
    assert as_the_standard_has_it(strange) == {
        "type": "object",
        "properties": {"format": True, "n": {"minLength": 2, "type": "string"}},
        "const": {"format": "password"},
        "items": [{"format": "date"}, {"maxItems": 1.5}],
    }
    assert strange["properties"]["n"]["format"] == "password", "what the client sent is left as it is"
    assert as_the_standard_has_it(True) == {} and as_the_standard_has_it(False) is False


@pytest.mark.parametrize("schema", [True, "true", {"type": "string", "format": "byte"}, {"maxItems": 2.0}])
def test_what_the_standard_takes_compiles(schema: Any):
    assert grammar_of(Form("schema", schema, "guided_json"), GRAMMARS)


def test_a_schema_nested_a_hundred_thousand_times_is_refused():
    deep: Any = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(RequestError, match="nested too deeply"):
        grammar_of(Form("schema", deep, "guided_json"), GRAMMARS)


def test_parts_are_found_wherever_a_schema_may_stand():
    schema = {"$defs": {"d": {}}, "properties": {"p": True}, "items": {}, "anyOf": [{}, 3], "const": {"items": {}}}
    assert [each for each, _ in parts_of(schema)] == [
        ("$defs", "d"),
        ("properties", "p"),
        ("anyOf", "0"),
        ("anyOf", "1"),
        ("items",),
    ]
