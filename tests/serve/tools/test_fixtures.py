"""Answers of many models, as a conformance suite has them: what they say, think and call, however they are cut."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from canitoolcall.fixtures import Fixture, default_fixtures_dir

from jdisagg.serve.frontends.tools.asked import Parsers
from jdisagg.serve.frontends.tools.parser import Reader, Said

FAMILIES = {
    "qwen3-hermes": Parsers("hermes", "think"),
    "llama": Parsers("llama3"),
    "mistral": Parsers("mistral", "mistral"),
    "deepseek": Parsers("deepseek", "think"),
    "gemma4": Parsers("gemma4", "gemma4"),
    "gpt-oss": Parsers("gpt_oss", "gpt_oss"),
    "qwen3-xml": Parsers("qwen3_coder", "think"),
    "glm": Parsers("glm", "think"),
    "kimi": Parsers("kimi_k2", "think"),
}
MORE = {  # of other models of these families
    "meta-llama/Llama-4": Parsers("llama4"),
    "deepseek-ai/DeepSeek-V3.2": Parsers("dsml", "think"),
    "deepseek-ai/DeepSeek-V4": Parsers("dsml", "think"),
    "moonshotai/Kimi-K3": Parsers("kimi_k3", "kimi_k3"),
}
LEFT_OUT = {
    "qwen3-xml/llamacpp-q35-call-inside-think": "reasoning ends where it is said to end",
    "kimi/k3-bug-response-only-completion": "so does that which the prompt has begun",
    "glm/glm47-missing-last-close-arg-value": "a text that does not end may hold the mark of the call's end",
}
OTHERS = {"mistral": "<think>"}


def fixtures(family: str) -> Iterator[Fixture]:
    for path in sorted((default_fixtures_dir() / family).glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            each = Fixture.from_dict(json.loads(line))
            if OTHERS.get(family, "\0") not in each.raw_output and each.id not in LEFT_OUT:
                yield each


CASES = [each for family in FAMILIES for each in fixtures(family)]


@cache
def prompts_of(family: str) -> dict[str, str]:
    """How a prompt ends before an answer, by model."""
    told = json.loads((default_fixtures_dir() / family / "family.json").read_text(encoding="utf-8"))
    return {each["repo"]: each.get("default_generation_prompt", "") for each in told["reference_models"]}


def reader_of(each: Fixture) -> Reader:
    model, prompts = each.models[0], prompts_of(each.family)
    parsers = next((found for name, found in MORE.items() if model.startswith(name)), FAMILIES[each.family])
    usual = next((prompts[name] for name in each.models if name in prompts), "")
    prompt = usual if each.generation_prompt is None else each.generation_prompt
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in each.tools}
    reader = parsers.reader(schemas, prompt)
    assert reader is not None
    return reader


def cuts(text: str, seed: int) -> Iterator[str]:
    """Seed 0: all at once, 1: a character each, else random."""
    generator, at = random.Random(seed), 0
    while at < len(text):
        size = len(text) if seed == 0 else 1 if seed == 1 else generator.randint(1, 12)
        yield text[at : at + size]
        at += size


def read(each: Fixture, seed: int) -> tuple[str, str, list[dict[str, Any]]]:
    reader = reader_of(each)
    told: list[Said] = [reader.feed(part) for part in cuts(each.raw_output, seed)]
    told.append(reader.end(not each.truncated))
    calls = [{"name": call.name, "arguments": json.loads(call.arguments)} for said in told for call in said.calls]
    return "".join(said.content for said in told), "".join(said.reasoning for said in told), calls


@pytest.mark.parametrize("each", CASES, ids=[each.id for each in CASES])
def test_an_answer_is_read_as_it_was_meant_and_alike_however_it_is_cut(each: Fixture):
    content, reasoning, calls = read(each, 0)
    if each.expected is None:
        assert not calls
    else:
        assert calls == [{"name": call.name, "arguments": call.arguments} for call in each.expected.tool_calls]
        assert content.strip() == (each.expected.content or "").strip()
        assert reasoning.strip() == (each.expected.reasoning_content or "").strip()
    for seed in range(1, 6):
        assert read(each, seed) == (content, reasoning, calls)
