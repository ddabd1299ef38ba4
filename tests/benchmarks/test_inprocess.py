"""A load on a stack in this process: real actors and driver, toy machines."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks.counters import Counters
from benchmarks.inprocess import Local, settings_of
from benchmarks.load import Burst, closed_loop
from benchmarks.workload import Job, Lengths, Workload
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.router_config import RouterConfig
from jdisagg.core.worker_config import Role
from jdisagg.engine.toy import ToyExecutor
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.policy.router.router import Router
from jdisagg.policy.worker.worker import Worker
from jdisagg.serve.driver.local_service import LocalService
from tests.serve.live_toy import MAX_LEN, PAGE_BYTES, PAGE_SIZE, worker_config
from tests.serve.scripted import FIXTURE


@contextmanager
def watched_stack() -> Iterator[tuple[LocalService, Counters]]:
    configs = [worker_config("prefill-0", Role.PREFILL, 256), worker_config("decode-0", Role.DECODE, 256)]
    tokenizer, counters = Tokenizer(FIXTURE), Counters(PAGE_BYTES)
    service = LocalService(
        Router(RouterConfig(), configs),
        {config.worker: Worker(config) for config in configs},
        {config.worker: ToyExecutor(config) for config in configs},
        model_name="toy",
        model_config=ModelConfig("llama", tokenizer.vocab_size, 8, 16, 1, 1, 1, 8, MAX_LEN),
        max_model_len=MAX_LEN,
        tokenizer=tokenizer,
        observers=[counters],
    )
    service.start()
    try:
        yield service, counters
    finally:
        service.stop()


def loaded(service: LocalService, jobs: list[Job]) -> Burst:
    return asyncio.run(closed_loop(jobs, 3, Local(service).ask))


def test_every_token_is_counted_and_the_ledger_is_within_what_the_client_saw() -> None:
    jobs = Workload(Lengths(4, 40), Lengths(2, 9), vocab_size=288).draw(9, "a")
    with watched_stack() as (service, counters):
        burst = loaded(service, jobs)
    assert [each.error for each in burst.samples] == [""] * 9
    assert sum(each.num_tokens for each in burst.samples) == sum(job.max_tokens for job in jobs)
    assert sum(each.num_prompt_tokens for each in burst.samples) == sum(len(job.prompt) for job in jobs)
    for each in burst.samples:
        assert each.ledger_ns is not None
        assert 0 < sum(each.ledger_ns.values()) <= each.e2e_s * 1e9
    assert counters.tokens == sum(job.max_tokens - 1 for job in jobs)  # the first token is the prefill's


def test_shipped_bytes_are_the_pages_of_the_prompts() -> None:
    jobs = [Job(tuple(range(5, 5 + length)), 4) for length in (3, 8, 20)]
    with watched_stack() as (service, counters):
        loaded(service, jobs)
    pages = sum(-(-len(job.prompt) // PAGE_SIZE) for job in jobs)
    figures = counters.figures()
    assert (figures["transfers"], figures["shipped_bytes"]) == (3, pages * PAGE_BYTES)


def test_a_request_that_cannot_be_is_a_failed_sample_and_the_rest_goes_on() -> None:
    with watched_stack() as (service, _):
        burst = loaded(service, [Job((1, 2), MAX_LEN), Job((1, 2), 3)])
    failed, done = sorted(burst.samples, key=lambda each: each.ok)
    assert "TooLong" in failed.error
    assert done.num_tokens == 3


def test_settings_are_read_with_their_types_and_unknown_ones_named() -> None:
    assert settings_of(["max_num_seqs=32", "dtype=float32", "hbm_fraction=0.5"]) == {
        "max_num_seqs": 32,
        "dtype": "float32",
        "hbm_fraction": 0.5,
    }
    with pytest.raises(ValueError, match="max_seqs"):
        settings_of(["max_seqs=32"])
