"""Keys and limits of clients, by HTTP and gRPC, over the toy stack."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc.aio
import httpx
import openai
import pytest

from jdisagg.core.errors import ConfigError
from jdisagg.core.request import FinishReason, Request
from jdisagg.core.settings import Settings
from jdisagg.policy.client_limits import Rates
from jdisagg.serve.deploy.servers import front_settings
from jdisagg.serve.frontends.clients import Clients, read_keys
from jdisagg.serve.frontends.front_settings import FrontSettings
from jdisagg.serve.frontends.grpc.jetstream_pb2_grpc import OrchestratorStub
from jdisagg.serve.frontends.grpc.server import create_grpc_server
from jdisagg.serve.frontends.http.app import create_app
from jdisagg.serve.observability.metrics import Metrics
from tests.serve.live_http import serving
from tests.serve.live_toy import toy_stack
from tests.serve.scripted import ScriptedService, Step, tokens
from tests.serve.test_grpc_front import text_request

COMPLETIONS, PROMPT = "/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 7}
ANN, BOB = ({"authorization": f"Bearer {key}"} for key in ("ann-key", "bob-key"))


@pytest.fixture
def keys() -> dict[str, str]:
    return {"ann": "ann-key", "bob": "bob-key"}


def three(request: Request) -> Iterator[Step]:
    """Three tokens and the end, whatever was asked for."""
    return tokens(request, [5, 6, 7], FinishReason.STOP)


@contextmanager
def limited(keys: dict[str, str], **rates: int) -> Iterator[str]:
    service = ScriptedService(three)
    settings = FrontSettings(api_keys=keys, rates=Rates(**rates))
    metrics = Metrics(service.model_name)
    clients = Clients(settings, service.now_s, metrics.limited)
    with serving(create_app(service, settings, metrics, clients=clients)) as url:
        yield url


def test_each_key_has_its_own_requests_a_minute_and_is_told_what_is_left(keys: dict[str, str]) -> None:
    with limited(keys, requests_per_minute=2) as url:
        left = [httpx.post(url + COMPLETIONS, json=PROMPT, headers=ANN) for _ in range(2)]
        assert [each.headers["x-ratelimit-remaining-requests"] for each in left] == ["1", "0"]
        refused = httpx.post(url + COMPLETIONS, json=PROMPT, headers=ANN)
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert "over the limit of 2 requests_per_minute" in refused.json()["error"]["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert refused.headers["x-ratelimit-limit-requests"] == "2"
        assert httpx.post(url + COMPLETIONS, json=PROMPT, headers=BOB).status_code == 200
        text = httpx.get(f"{url}/metrics").text
        assert 'jdisagg_requests_limited_total{limit="requests_per_minute",model_name="tiny"} 1.0' in text


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_that_an_answer_did_not_use_may_be_asked_for_again(keys: dict[str, str], stream: bool) -> None:
    """Of 3 + 90 tokens each takes 6."""
    with limited(keys, tokens_per_minute=100) as url:
        body = {"prompt": [5, 6, 7], "max_tokens": 90, "stream": stream}
        for _ in range(2):
            assert httpx.post(url + COMPLETIONS, json=body, headers=ANN).status_code == 200
        first = httpx.post(url + COMPLETIONS, json=body, headers=ANN)
        assert first.status_code == 429 and "tokens_per_minute" in first.json()["error"]["message"]
        assert 80 <= int(first.headers["x-ratelimit-remaining-tokens"]) < 93


def test_a_client_may_ask_again_as_soon_as_its_last_request_has_ended(keys: dict[str, str]) -> None:
    with limited(keys, concurrent_requests=1) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="ann-key", max_retries=0)
        for _ in range(3):
            assert client.completions.create(model="tiny", prompt="x", max_tokens=2).choices
        with client.completions.create(model="tiny", prompt="x", max_tokens=2, stream=True) as stream:
            next(iter(stream))
        assert client.completions.create(model="tiny", prompt="x", max_tokens=2).choices


def test_what_is_refused_for_its_content_counts_against_no_limit(keys: dict[str, str]) -> None:
    with limited(keys, requests_per_minute=1) as url:
        assert httpx.post(url + COMPLETIONS, json={"prompt": 3}, headers=ANN).status_code == 400
        assert httpx.post(url + COMPLETIONS, json=PROMPT, headers=ANN).status_code == 200


def test_without_keys_an_address_has_the_limit() -> None:
    with limited({}, requests_per_minute=1) as url:
        assert [httpx.post(url + COMPLETIONS, json=PROMPT).status_code for _ in range(2)] == [200, 429]


def test_without_limits_nothing_is_said_of_any() -> None:
    with limited({}) as url:
        answer = httpx.post(url + COMPLETIONS, json=PROMPT)
        assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


def test_a_wrong_key_beside_many_right_ones_is_refused(keys: dict[str, str]) -> None:
    with limited(keys) as url:
        for given in ({}, {"authorization": "Bearer ann-ke"}, {"authorization": "ann-key"}):
            assert httpx.post(url + COMPLETIONS, json=PROMPT, headers=given).status_code == 401


def test_http_and_grpc_share_a_clients_allowance(keys: dict[str, str]) -> None:
    service, settings = ScriptedService(), FrontSettings(api_keys=keys, rates=Rates(requests_per_minute=1))
    clients = Clients(settings, service.now_s)

    async def ask() -> grpc.StatusCode:
        server = create_grpc_server(service, settings, clients)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await OrchestratorStub(channel).Decode(text_request(max_tokens=1), metadata=tuple(ANN.items())).read()
        await server.stop(grace=0)
        return caught.value.code()

    with serving(create_app(service, settings, clients=clients)) as url:
        assert httpx.post(url + COMPLETIONS, json=PROMPT, headers=ANN).status_code == 200
    assert asyncio.run(ask()) is grpc.StatusCode.RESOURCE_EXHAUSTED


def keys_file(folder: Path, text: str, mode: int = 0o600) -> str:
    path = folder / "keys"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_keys_are_read_by_name(tmp_path: Path, keys: dict[str, str]) -> None:
    assert read_keys(keys_file(tmp_path, "# ours\nann ann-key\n\nbob\tbob-key\n")) == keys


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ann a b\n", "line 1 must be a name and a key"),
        ("ann k\nbob\n", "line 2 must be"),
        ("ann kéy\n", "line 1 must be"),
        ("ann k\nann l\n", "line 2 has the name 'ann'"),
        ("ann k\nbob k\n", "or its key, again"),
        ("# none\n", "holds no key"),
    ],
)
def test_a_file_of_keys_that_cannot_be_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_keys(keys_file(tmp_path, text))


def test_a_file_of_keys_that_others_may_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="others may read it"):
        read_keys(keys_file(tmp_path, "ann k\n", mode=0o644))


def test_keys_and_rates_of_the_flags_are_those_of_the_servers(tmp_path: Path, keys: dict[str, str]) -> None:
    path = keys_file(tmp_path, "ann ann-key\nbob bob-key\n")
    flags = Settings(api_keys_file=path, client_limits="tokens=2,running=3,requests=1")
    with toy_stack() as stack:
        front = front_settings(stack.service, flags)
    assert front.api_keys == keys and front.rates == Rates(1, 2, 3)
    assert front.admin_key is None


@pytest.mark.parametrize("text", ["requests", "requests=", "requests=0", "tokens=-1", "requests=1,requests=2", "x=1"])
def test_limits_that_cannot_be_are_refused_with_what_there_is(text: str) -> None:
    with pytest.raises(ConfigError, match="must be one of requests, tokens, running, once, with a number over 0"):
        Rates.parse(text)
