"""The official client drives every endpoint of a real server: sync, async and streaming."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from tests.serve.live_http import Front
from tests.serve.scripted import tokens

PARROT = "Grüße, 世界 🦜! "
USER: list[Any] = [{"role": "user", "content": PARROT}]


def say(front: Front, text: str) -> list[int]:
    """Makes every answer `text`; its token ids."""
    ids = front.service.tokenizer.encode(text, add_special_tokens=False)
    front.service.script = lambda request: tokens(request, ids)
    return ids


def test_a_completion_has_text_usage_and_a_reason(front: Front) -> None:
    answer = front.client.completions.create(model="tiny", prompt="hello", max_tokens=5, temperature=0)
    assert answer.choices[0].text == "hello"  # the special token at the start is not shown
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 5, 10)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.id.startswith("cmpl-")
    assert answer.system_fingerprint


def test_a_streamed_completion_brings_characters_whole_and_usage_last(front: Front) -> None:
    ids = say(front, PARROT)
    stream = front.client.completions.create(
        model="tiny", prompt="x", max_tokens=100, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    texts = [choice.text for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == PARROT
    assert not any("\ufffd" in text for text in texts)
    assert len(texts) > 8
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(ids)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert reasons[-1] == "stop"
    assert set(reasons[:-1]) == {None}


@pytest.mark.parametrize("prompt", ["one", ["one", "two"], [70, 71, 72], [[70, 71], [72]]])
def test_every_spelling_of_a_prompt_is_taken(front: Front, prompt: Any) -> None:
    answer = front.client.completions.create(model="tiny", prompt=prompt, max_tokens=2, temperature=0)
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    assert [choice.index for choice in answer.choices] == list(range(len(prompt) if several else 1))
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(request.prompt) for request in front.service.seen)


def test_echo_with_logprobs_tells_the_prompts_tokens_as_evaluation_harnesses_need(front: Front) -> None:
    answer = front.client.completions.create(
        model="tiny", prompt=[70, 71, 72], max_tokens=1, temperature=0, logprobs=1, echo=True
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == [None, -1.0, -1.0, -0.5]
    assert logprobs.tokens is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[1] == {logprobs.tokens[1]: -1.0}
    assert answer.choices[0].text == "".join(logprobs.tokens)
    assert logprobs.text_offset == [0, 1, 2, 3]
    assert front.service.seen[0].sampling.prompt_logprobs == 1


def test_echo_without_output_scores_the_prompt_alone(front: Front) -> None:
    answer = front.client.completions.create(model="tiny", prompt="hello", max_tokens=0, logprobs=0, echo=True)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == ("hello", "length")
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert len(choice.logprobs.token_logprobs) == 5
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_a_streamed_echo_begins_with_the_prompt(front: Front) -> None:
    say(front, " world")
    stream = front.client.completions.create(model="tiny", prompt="hello", echo=True, stream=True, logprobs=0)
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "hello world"
    assert chunks[0].choices[0].logprobs is not None
    assert chunks[0].choices[0].logprobs.token_logprobs == [None, *[-1.0] * 4]
    offsets = [offset for chunk in chunks for offset in chunk.choices[0].logprobs.text_offset]  # type: ignore
    assert offsets[:5] == [0, 0, 2, 3, 4]
    assert offsets[-1] == len("hello worl")


def test_parts_of_characters_have_names_of_their_own_in_logprobs(front: Front) -> None:
    say(front, "世")
    answer = front.client.completions.create(model="tiny", prompt="x", logprobs=0)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["bytes:\\xe4", "bytes:\\xb8", "bytes:\\x96"]
    assert answer.choices[0].logprobs.text_offset == [0, 1, 1]


def test_a_chat_goes_through_the_models_template(front: Front) -> None:
    answer = front.client.chat.completions.create(model="tiny", messages=USER, max_tokens=200, temperature=0)
    shown = front.service.tokenizer.chat(USER)
    assert front.service.tokenizer.decode(front.service.seen[0].prompt, skip_special_tokens=False) == shown
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.object == "chat.completion"


def test_a_chat_without_a_limit_may_fill_the_models_length(front: Front) -> None:
    say(front, "fine")
    front.client.chat.completions.create(model="tiny", messages=USER)
    request = front.service.seen[0]
    assert request.sampling.max_tokens == front.service.max_model_len - len(request.prompt)


def test_a_streamed_chat_begins_with_the_role_and_ends_with_a_reason(front: Front) -> None:
    say(front, PARROT)
    chunks = list(front.client.chat.completions.create(model="tiny", messages=USER, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == PARROT
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_chat_logprobs_have_true_bytes(front: Front) -> None:
    ids = say(front, "é世")
    answer = front.client.chat.completions.create(model="tiny", messages=USER, logprobs=True, top_logprobs=2)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert len(content) == len(ids)
    assert bytes(byte for token in content for byte in token.bytes or []) == "é世".encode()
    assert [len(token.top_logprobs) for token in content] == [2] * len(ids)


def test_streamed_logprobs_cover_every_token_once(front: Front) -> None:
    ids = say(front, PARROT)
    stream = front.client.chat.completions.create(model="tiny", messages=USER, logprobs=True, stream=True)
    seen = [entry for chunk in stream if (lp := chunk.choices[0].logprobs) for entry in lp.content or []]
    assert bytes(byte for entry in seen for byte in entry.bytes or []) == PARROT.encode()
    assert len(seen) == len(ids)


def test_the_last_message_can_be_continued(front: Front) -> None:
    open_end: list[Any] = [*USER, {"role": "assistant", "content": "I think that "}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    front.client.chat.completions.create(model="tiny", messages=open_end, max_tokens=1, extra_body=extra)
    assert front.service.tokenizer.decode(front.service.seen[0].prompt).endswith("I think that")


def test_content_in_parts_is_joined(front: Front) -> None:
    parts: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    front.client.chat.completions.create(model="tiny", messages=parts, max_tokens=1)
    assert "user\nab<|end|>" in front.service.tokenizer.decode(front.service.seen[0].prompt, False)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_split_over_tokens_never_shows(front: Front, stream: bool) -> None:
    ids = say(front, "one two THREE four five")
    answer: Any = front.client.completions.create(
        model="tiny", prompt="x", max_tokens=100, stop=["THREE", "zzz"], stream=stream
    )
    chunks = list(answer) if stream else [answer]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "one two "
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].choices[0].model_extra["stop_reason"] == "THREE"
    request_id = front.service.seen[0].request_id
    assert request_id in front.service.cancelled
    assert not front.service.running
    if not stream:
        assert answer.usage.completion_tokens < len(ids)


def test_several_choices_differ_by_their_seed_and_repeat_with_it(front: Front) -> None:
    def ask() -> list[str]:
        answer = front.client.completions.create(model="tiny", prompt="abcdefghij", n=3, seed=7, max_tokens=11)
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (11, 33)
        return [choice.text for choice in answer.choices]

    first = ask()
    assert len({request.sampling.seed for request in front.service.seen}) == 3
    assert front.service.seen[0].sampling.seed == 7
    assert ask() == first
    assert len(set(first)) > 1


def test_without_a_seed_one_is_drawn(front: Front) -> None:
    for _ in range(2):
        front.client.completions.create(model="tiny", prompt="a", max_tokens=1)
    seeds = [request.sampling.seed for request in front.service.seen]
    assert seeds[0] != seeds[1]


def test_streamed_choices_can_be_told_apart(front: Front) -> None:
    stream = front.client.chat.completions.create(
        model="tiny", messages=USER, n=2, max_tokens=9, temperature=0, stream=True
    )
    texts = {0: "", 1: ""}
    roles = []
    for chunk in stream:
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        roles += [choice.index] if choice.delta.role else []
    assert sorted(roles) == [0, 1]
    assert texts[0] == texts[1] != ""


def test_every_sampling_field_reaches_the_request(front: Front) -> None:
    extra = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "min_tokens": 1,
        "ignore_eos": True,
        "stop_token_ids": [9],
        "priority": -2,
        "ttft_s": 0.5,
        "tpot_s": 0.05,
    }
    front.client.completions.create(
        model="also-tiny",
        prompt="a",
        max_tokens=3,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        logit_bias={"7": -3},
        extra_body=extra,
    )
    request = front.service.seen[0]
    sampling = request.sampling
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty, sampling.min_tokens) == (5, 0.1, 1.2, 1)
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.9, 3)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.3, 0.4)
    assert (sampling.logit_bias, sampling.stop_token_ids) == (((7, -3.0),), (9,))
    assert (request.priority, request.ttft_s, request.tpot_s) == (-2, 0.5, 0.05)


def test_the_ledger_comes_on_request_and_its_parts_sum(front: Front) -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 2, "ledger": True}
    whole = httpx.post(f"{front.url}/v1/completions", json=body)
    ledger = whole.json()["choices"][0]["ledger"]
    assert ledger["total_ns"] == sum(ledger["parts_ns"].values()) == 6_000_000
    assert whole.headers["x-prefill-instance-id"] == "prefill-0"
    assert whole.headers["x-decode-instance-id"] == "decode-0"
    streamed = httpx.post(f"{front.url}/v1/completions", json=body | {"stream": True})
    events = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
    assert json.loads(events[-2])["choices"][0]["ledger"] == ledger


def test_request_ids_go_in_and_out(front: Front) -> None:
    raw = front.client.completions.with_raw_response.create(
        model="tiny", prompt="a", max_tokens=1, extra_headers={"x-request-id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.parse().id == "cmpl-mine-1"
    drawn = httpx.get(f"{front.url}/live", headers={"x-request-id": "bad id!"})
    assert len(drawn.headers["x-request-id"]) == 32


def test_the_same_request_id_twice_at_once_is_no_clash(front: Front) -> None:
    async def ask() -> list[str]:
        client = openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)
        headers = {"x-request-id": "same"}
        one = [client.completions.create(model="tiny", prompt="a", extra_headers=headers) for _ in range(4)]
        return [answer.id for answer in await asyncio.gather(*one)]

    assert asyncio.run(ask()) == ["cmpl-same"] * 4
    assert len({request.request_id for request in front.service.seen}) == 4


def test_the_async_client_streams_many_at_once(front: Front) -> None:
    async def one(client: openai.AsyncOpenAI, text: str) -> str:
        stream = await client.completions.create(
            model="tiny", prompt=[70, *text.encode()], max_tokens=1 + len(text), temperature=0, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def everyone() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, chr(65 + i) * 8) for i in range(16)))

    answers = asyncio.run(everyone())
    assert answers == [front.service.tokenizer.decode([70, *[65 + i] * 8]) for i in range(16)]


def test_token_ids_come_on_request(front: Front) -> None:
    body = {"prompt": [70, 71], "max_tokens": 3, "temperature": 0, "return_token_ids": True}
    choice = httpx.post(f"{front.url}/v1/completions", json=body).json()["choices"][0]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([70, 71, 70], [70, 71])


def test_prompt_logprobs_rank_the_prompts_tokens(front: Front) -> None:
    body = {"prompt": [70, 71], "max_tokens": 1, "prompt_logprobs": 1, "return_tokens_as_token_ids": True}
    choice = httpx.post(f"{front.url}/v1/completions", json=body).json()["choices"][0]
    assert choice["prompt_logprobs"] == [None, {"71": {"logprob": -1.0, "rank": 1, "decoded_token": "token_id:71"}}]


def test_models_are_listed_and_found(front: Front) -> None:
    assert [model.id for model in front.client.models.list()] == ["tiny", "also-tiny"]
    assert front.client.models.retrieve("tiny").model_extra["max_model_len"] == 512  # type: ignore[index]
    with pytest.raises(openai.NotFoundError):
        front.client.models.retrieve("huge")


def test_tokenize_and_detokenize_are_each_others_inverse(front: Front) -> None:
    tokenized = httpx.post(f"{front.url}/tokenize", json={"prompt": PARROT, "add_special_tokens": False}).json()
    assert tokenized["count"] == len(tokenized["tokens"])
    assert tokenized["max_model_len"] == 512
    back = httpx.post(f"{front.url}/detokenize", json={"tokens": tokenized["tokens"]}).json()
    assert back == {"prompt": PARROT}
    chat = httpx.post(f"{front.url}/tokenize", json={"messages": USER, "return_token_strs": True}).json()
    assert "".join(chat["token_strs"]).startswith("<|start|>user")


def test_states_are_told_apart(front: Front) -> None:
    def states() -> list[int]:
        return [httpx.get(f"{front.url}/{path}").status_code for path in ("health", "live", "ready", "ping")]

    assert states() == [200, 200, 200, 200]
    front.service.draining = True
    assert states() == [200, 200, 503, 200]
    front.service.draining, front.service.ready = False, False
    assert states() == [503, 200, 503, 200]


def test_the_description_names_bodies_and_paths(front: Front) -> None:
    document = httpx.get(f"{front.url}/openapi.json").json()
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/metrics"} <= document["paths"].keys()
    assert "min_p" in document["components"]["schemas"]["ChatBody"]["properties"]
    assert httpx.get(f"{front.url}/version").json()["version"] == document["info"]["version"]


def test_the_description_names_the_errors_and_their_body(front: Front) -> None:
    """That no other is sent is held at the end of every file of tests (`live_http.serving`)."""
    document = httpx.get(f"{front.url}/openapi.json").json()
    told = document["paths"]["/v1/completions"]["post"]["responses"]
    assert {"400", "401", "404", "408", "413", "429", "431", "500", "503"} <= told.keys() and "422" not in told
    assert told["400"]["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorBody")
    assert document["components"]["schemas"]["ErrorDetail"]["required"] == ["message", "type", "param", "code"]


@pytest.mark.parametrize(("most", "kept"), [(4, 4), (400, 30), (-1, 30)])
def test_of_a_prompt_its_last_tokens_are_kept_where_that_is_asked_for(front: Front, most: int, kept: int) -> None:
    body = {"truncate_prompt_tokens": most}
    answer = front.client.completions.create(model="tiny", prompt=[*range(65, 95)], max_tokens=1, extra_body=body)
    assert front.service.seen[-1].prompt == tuple(range(95 - kept, 95))
    assert answer.usage is not None and answer.usage.prompt_tokens == kept


def test_a_bias_may_be_given_to_a_token_by_its_text(front: Front) -> None:
    (token,) = front.service.tokenizer.encode("a", False)
    front.client.completions.create(model="tiny", prompt="x", max_tokens=1, logit_bias={"a": 5})
    assert front.service.seen[-1].sampling.logit_bias == ((token, 5.0),)
    with pytest.raises(openai.BadRequestError, match="the text of one token"):
        front.client.completions.create(model="tiny", prompt="x", logit_bias={"a a a": 5})


def test_a_server_says_what_it_serves_and_how_it_reads_requests(front: Front) -> None:
    said = httpx.get(f"{front.url}/server_info").json()
    assert said["max_model_len"] == front.service.max_model_len and said["structured_output"] == "on"
    assert (said["tool_call_parser"], said["reasoning_parser"]) == ("off", "off")
