"""A sample of the public schemas: each answer that their masks allow is what the schema takes."""

from typing import Any

import pytest

from benchmarks.schemas import Case, Count, Reader, cases, local, measure, referred, told


@pytest.mark.slow
def test_answers_under_the_masks_of_public_schemas_are_what_these_take():
    found = measure("", every=12)["Kubernetes"]
    assert found["schemas"] > 40 and found["answers"] > 25
    assert found["valid"] == found["answers"] and not found["wrong"] and not found["unjudged"]


def test_what_a_schema_refuses_its_grammar_refuses_and_what_it_cannot_say_is_told():
    reader, count = Reader(), Count()
    schema = {"type": "array", "items": {"type": "integer", "minimum": 3}, "maxItems": 2}
    reader.read(Case("own", "numbers", schema, invalid=([2], [4, 5, 6], "x", {})), count, seed=1)
    reader.read(Case("own", "unique", {"type": "array", "uniqueItems": True}), count, seed=1)
    found = told(count)
    assert (found["schemas"], found["compiled"], found["answers"], found["valid"]) == (2, 1, 1, 1)
    assert found["refused"] == {"keywords that llguidance does not know": 1}
    assert found["invalid_instances"] == 4 and not found["accepted_invalid"]


def test_an_answer_that_its_schema_does_not_take_is_counted():
    reader, count = Reader(), Count()
    reader._judge(Case("own", "lax", {"type": "string"}), "3", count)  # pyright: ignore[reportPrivateUsage]
    assert len(count.wrong) == 1 and count.wrong[0].startswith("lax: 3 is not of type 'string'")


def test_a_kind_of_kubernetes_comes_with_all_it_refers_to():
    schema: Any = {"$ref": "https://kubernetes.io/api/_definitions.json#/$defs/io.Pod"}
    assert local(schema) == {"$ref": "#/$defs/io.Pod"} and referred(local(schema)) == {"io.Pod"}
    pod = next(each for each in cases("") if each.name == "pod-v1")
    assert referred(pod.schema) <= pod.schema["$defs"].keys() and len(pod.schema["$defs"]) > 50
