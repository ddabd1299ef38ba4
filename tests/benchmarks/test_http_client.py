"""The load client against a server whose answers are known, token by token."""

import asyncio

import pytest

from benchmarks.http_client import HTTPFailed, Server, first_model
from benchmarks.load import Burst, Sample, closed_loop
from benchmarks.workload import Job
from tests.benchmarks.sse_server import SSEServer, serving

JOB = Job((1, 2, 3), 5)


def asked(server: SSEServer, *jobs: Job, concurrency: int = 1, **fields: object) -> Burst:
    async def ask() -> Burst:
        async with serving(server):
            return await closed_loop(jobs, concurrency, Server(server.url, "counter", fields).ask)

    return asyncio.run(ask())


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_every_token_is_timed_whatever_the_framing(split: bool, chunked: bool) -> None:
    (sample,) = asked(SSEServer(pace_s=0.01, split=split, chunked=chunked), JOB).samples
    assert sample.error == ""
    assert (sample.num_prompt_tokens, sample.num_tokens, len(sample.arrivals_s)) == (3, 5, 5)
    assert sample.ttft_s >= 0.01
    assert all(gap >= 0.009 for gap in sample.itl_s)
    assert sample.e2e_s >= 0.05


def test_the_body_asks_for_exactly_the_tokens_of_the_job() -> None:
    server = SSEServer()
    asked(server, JOB, ledger=True)
    (body,) = server.bodies
    assert body["prompt"] == [1, 2, 3]
    assert (body["max_tokens"], body["ignore_eos"], body["stream"], body["ledger"]) == (5, True, True, True)


def test_the_ledger_of_the_last_chunk_is_kept() -> None:
    (sample,) = asked(SSEServer(), JOB, ledger=True).samples
    assert sample.ledger_ns == {"queue": 1_000_000, "decode": 3_000_000}


def test_a_refusal_is_a_failed_sample_that_says_why() -> None:
    (sample,) = asked(SSEServer(refuse=True), JOB).samples
    assert not sample.ok
    assert "429" in sample.error


def test_nobody_at_the_address_is_a_failed_sample() -> None:
    async def ask() -> Sample:
        server = SSEServer()
        async with serving(server):
            url = server.url
        return await Server(url, "counter").ask(JOB)

    assert "Connect" in asyncio.run(ask()).error


def test_the_loop_keeps_no_more_than_its_streams_running_and_asks_for_all() -> None:
    server = SSEServer(pace_s=0.005)
    burst = asked(server, *[JOB] * 7, concurrency=3)
    assert (server.most_running, len(burst.samples)) == (3, 7)
    assert burst.wall_s >= 3 * 5 * 0.005


def test_the_first_model_is_the_one_listed_first() -> None:
    async def name() -> str:
        async with serving(SSEServer()) as server:
            return await first_model(server.url)

    assert asyncio.run(name()) == "counter"


def test_a_refused_post_raises_with_the_status() -> None:
    async def post() -> None:
        async with serving(SSEServer(refuse=True)) as server:
            await Server(server.url, "counter").post("/completions", {})

    with pytest.raises(HTTPFailed, match="429"):
        asyncio.run(post())
