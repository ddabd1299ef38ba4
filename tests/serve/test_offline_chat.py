"""The library's chats, forms and vectors are those of HTTP: tools, reasoning, grammars, embeddings."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jdisagg.core.errors import RequestError
from jdisagg.core.request import Adapter, SamplingParams
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.serve.frontends import offline
from jdisagg.serve.frontends.front_settings import FrontSettings
from jdisagg.serve.frontends.tools.asked import Parsers
from tests.hostile.model_folders import copy
from tests.serve.live_tools import ANSWER, TEMPLATE, TIME, WEATHER
from tests.serve.live_toy import toy_stack
from tests.serve.scripted import ScriptedService, tokens

SETTINGS = FrontSettings(parsers=Parsers("hermes", "think"), embeddings="mean")
USER: Any = [{"role": "user", "content": "Weather?"}]
MANY = SamplingParams(max_tokens=500, temperature=0.0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = copy(tmp_path_factory.mktemp("model") / "tiny")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer(folder)


@pytest.fixture
def service(tokenizer: Tokenizer) -> Iterator[ScriptedService]:
    service = ScriptedService(max_model_len=4096)
    service.tokenizer = tokenizer
    yield service


def says(service: ScriptedService, text: str) -> None:
    service.script = lambda request: tokens(request, service.tokenizer.encode(text, False))


def chat(service: ScriptedService, sampling: SamplingParams = MANY, **options: Any) -> offline.Choice:
    return asyncio.run(offline.chat(service, USER, sampling, SETTINGS, options)).choices[0]


def test_an_answers_reasoning_words_and_calls_are_told_apart(service: ScriptedService):
    says(service, ANSWER)
    choice = chat(service, tools=[WEATHER, TIME])
    assert (choice.text, choice.reasoning, choice.finish_reason) == ("Let me see.", "Hm, weather.", "tool_calls")
    assert [(call.name, json.loads(call.arguments)) for call in choice.calls] == [
        ("get_weather", {"city": "Ulm"}),
        ("get_time", {}),
    ]
    assert '"name": "get_weather"' in service.tokenizer.decode(service.seen[-1].prompt)


def test_a_tool_that_must_be_called_is(service: ScriptedService):
    says(service, '{"city": "Ulm"}')
    named = {"type": "function", "function": {"name": "get_weather"}}
    (call,) = chat(service, tools=[WEATHER], tool_choice=named).calls
    assert call.name == "get_weather" and service.seen[-1].sampling.grammar


@pytest.mark.parametrize(
    "said",
    [
        {"seed": 3, "top_k": 5, "min_tokens": 2, "stop": ("x", "y"), "stop_token_ids": (7,), "logit_bias": {70: 1.0}},
        {"n": 3, "logprobs": 2, "prompt_logprobs": 1, "ignore_eos": True, "speculative": False},
        {"structured_outputs": {"regex": "[a-f]+"}, "presence_penalty": 0.5},
    ],
)
def test_what_is_said_of_sampling_reaches_the_request(service: ScriptedService, said: dict[str, Any]):
    sampling = SamplingParams(max_tokens=4, temperature=0.5, **said)
    answer = asyncio.run(offline.chat(service, USER, sampling, SETTINGS))
    request, wanted = service.seen[0].sampling, sampling.resolve({}, service.tokenizer.eos_ids)
    for name in ("max_tokens", "temperature", "top_k", "min_tokens", "logit_bias", "logprobs", "prompt_logprobs"):
        assert getattr(request, name) == getattr(wanted, name), name
    assert set(said.get("stop_token_ids", ())) <= set(request.stop_token_ids)
    assert request.speculative == wanted.speculative and bool(request.grammar) == ("structured_outputs" in said)
    assert len(answer.choices) == sampling.n and (answer.logprobs is None) == (sampling.logprobs is None)


def test_a_chat_is_drawn_by_its_callers_adapter(service: ScriptedService):
    adapter = Adapter("french", "0" * 32, "/french")
    chat(service, SamplingParams(max_tokens=2, adapter=adapter))
    assert service.seen[0].sampling.adapter == adapter


def test_a_prompt_is_held_to_its_form_and_may_end_though_ends_are_ignored(service: ScriptedService):
    sampling = SamplingParams(structured_outputs={"choice": ["yes", "no"]}, ignore_eos=True)
    asyncio.run(offline.complete(service, "x", sampling, SETTINGS))
    drawn = service.seen[0].sampling
    assert drawn.grammar and drawn.synchronous and set(service.tokenizer.eos_ids) <= set(drawn.stop_token_ids)
    with pytest.raises(RequestError, match="structured_outputs"):
        asyncio.run(offline.complete(service, "x", SamplingParams(structured_outputs={"regex": "("}), SETTINGS))


def test_an_option_that_there_is_not_is_named(service: ScriptedService):
    with pytest.raises(RequestError, match="chat takes no 'toolz'"):
        chat(service, toolz=[])


def test_texts_become_vectors_as_over_http():
    with toy_stack() as stack:
        vectors = asyncio.run(offline.embed(stack.service, [[3, 4], "abc", [3, 4]], SETTINGS))
        last = asyncio.run(offline.embed(stack.service, [[0, 9, 0]], SETTINGS, "last"))
        with pytest.raises(RequestError, match="--embeddings"):
            asyncio.run(offline.embed(stack.service, ["x"], FrontSettings()))
    assert vectors[0] == vectors[2] != vectors[1] and last == [[0.0, 1.0]]


def test_answers_in_the_own_process_need_no_http_server():
    code = "import sys, jdisagg.serve.frontends.offline; sys.exit(bool({'fastapi', 'starlette'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
