"""Requests whose content is the attack: nobody else's stream waits for them, and each is refused with its reason."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import grpc
import httpx
import pytest

from jdisagg.serve.frontends.grpc.jetstream_pb2 import DecodeRequest
from jdisagg.serve.frontends.grpc.jetstream_pb2_grpc import OrchestratorStub
from tests.hostile.bystander import Server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SIZE = 4_000_000  # bytes, a little under the limit on bodies


def listed(field: str, item: str, last: str = "0", more: str = "") -> bytes:
    """A body whose list fills it with one item over and over, and ends with another."""
    return (f'{{{more}"{field}":[' + f"{item}," * (SIZE // (len(item) + 1)) + f"{last}]}}").encode()


def chat(content: str) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}]}).encode()


BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "a prompt of empty objects": (COMPLETIONS, lambda: listed("prompt", "{}")),
    "a prompt of empty lists": (COMPLETIONS, lambda: listed("prompt", "[]")),
    "messages that are numbers": (CHAT, lambda: listed("messages", "0")),
    "stop strings that are numbers": (COMPLETIONS, lambda: listed("stop", "0", more='"prompt":"x",')),
    "tokens that are texts": ("/detokenize", lambda: listed("tokens", '"a"')),
    "empty prompts": (COMPLETIONS, lambda: listed("prompt", '""', '""')),
    "token ids": (COMPLETIONS, lambda: listed("prompt", "7", "7")),
    "a hundred thousand wrong token ids": (COMPLETIONS, lambda: b'{"prompt":[' + b"-1," * 100_000 + b"0]}"),
    "keys": (COMPLETIONS, lambda: b"{" + b",".join(b'"%d":1' % i for i in range(300_000)) + b"}"),
    "logit biases": (
        COMPLETIONS,
        lambda: b'{"prompt":"x","logit_bias":{' + b",".join(b'"%d":"x"' % i for i in range(16_000)) + b"}}",
    ),
    "nested lists": (COMPLETIONS, lambda: b'{"prompt":' + b"[" * SIZE),
    "one letter": (COMPLETIONS, lambda: json.dumps({"prompt": "a" * SIZE}).encode()),
    "one letter in a chat": (CHAT, lambda: chat("a" * SIZE)),
    "one letter to tokenize": ("/tokenize", lambda: json.dumps({"prompt": "a" * SIZE}).encode()),
    "special tokens in a chat": (CHAT, lambda: chat("<s>" * (SIZE // 3))),
    "escapes": (COMPLETIONS, lambda: b'{"prompt":"' + b"\\\\" * (SIZE // 2) + b'"}'),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_of_four_megabytes_delays_nobody(server: Server, name: str) -> None:
    path, body = BODIES[name]
    content = body()
    with server.bystander():
        answers = [httpx.post(server.url + path, content=content, timeout=60) for _ in range(3)]
    for answer in answers:
        assert answer.status_code == 400, answer.text[:300]
        assert len(answer.text) < 2_000


def test_several_at_once_delay_nobody(server: Server) -> None:
    contents = [(path, body()) for path, body in BODIES.values()]

    def attack(path: str, content: bytes) -> None:
        statuses.append(httpx.post(server.url + path, content=content, timeout=60).status_code)

    statuses: list[int] = []
    with server.bystander():
        attackers = [threading.Thread(target=attack, args=each) for each in contents]
        for each in attackers:
            each.start()
        for each in attackers:
            each.join(timeout=60)
    assert statuses == [400] * len(contents)


def test_a_prompt_over_grpc_is_refused_by_its_bytes(server: Server) -> None:
    with server.bystander(), grpc.insecure_channel(server.grpc) as channel:
        asked = DecodeRequest(text_content=DecodeRequest.TextContent(text="a" * SIZE))
        with pytest.raises(grpc.RpcError) as caught:
            list(OrchestratorStub(channel).Decode(asked, timeout=60))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # pyright: ignore[reportAttributeAccessIssue]
    assert "bytes" in str(caught.value.details())  # pyright: ignore[reportAttributeAccessIssue]


def test_a_large_answer_is_written_without_holding_anybody_up(server: Server) -> None:
    body: dict[str, Any] = {"prompt": "x", "n": 32, "max_tokens": 200, "ignore_eos": True, "logprobs": 20}
    with server.bystander():
        answer = httpx.post(server.url + COMPLETIONS, json=body | {"echo": True}, timeout=120)
    assert answer.status_code == 200 and len(answer.content) > 2_000_000


@pytest.mark.parametrize("n", ["9" * 5000, "-1", "1e3", "٣٣"])
def test_a_number_in_a_query_is_no_mistake_of_ours(server: Server, n: str) -> None:
    assert httpx.get(f"{server.url}/debug/decisions", params={"n": n}).status_code in (200, 400)
    assert "Traceback" not in server.log()
