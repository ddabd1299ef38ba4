"""Prompts whose destination has pages of another size: every token leaves once, in whole pages of both ends."""

from __future__ import annotations

from math import lcm

from hypothesis import given, settings
from hypothesis import strategies as st

from jdisagg.core.events import Received, Send, ShipKV, StepDone
from jdisagg.core.layout.kv_layout import NULL_PAGE
from jdisagg.core.messages import Reserved, StartPrefill
from jdisagg.core.request import Attempt, Request, RequestId, Sampled, SamplingParams, WorkerId
from jdisagg.core.steps import KVTransfer
from jdisagg.core.worker_config import Role, TransferMode
from jdisagg.policy.router.request_state import reserve_for
from jdisagg.policy.worker.worker import Worker
from tests.sim.cases import worker
from tests.steps import runs_prefill

A1 = Attempt(RequestId("a"), 1)

GROUPS = ((0, 3), (3, 8))
THERE = WorkerId("decode-0")


def shipped(
    mode: TransferMode, ours: int, theirs: int, tokens: int, chunk: int, cached: int = 0, told: int | None = None
) -> list[KVTransfer]:
    """The parts of one prompt of `tokens` tokens, prefilled `chunk` tokens at a time; decode pages are 1000 and on.

    told: what the worker hears of the size of their pages, where that is not the truth.
    """
    sizes = {"page_size": ours, "prefill_buckets": (chunk,), "table_buckets": (512,), "num_pages": 512}
    config = worker("prefill-0", Role.PREFILL, layer_groups=GROUPS, transfer=mode, max_model_len=4096, **sizes)
    request = Request(RequestId("a"), (7,) * tokens, SamplingParams(max_tokens=9))
    pages = tuple(range(1000, 1000 + -(-(tokens + 8) // theirs)))
    size = theirs if told is None else told
    start = StartPrefill(A1, request, 0, THERE, pages, 100.0, 100.0, cached_pages=cached, decode_page_size=size)
    actor, waiting, found = Worker(config), [], []
    events = [Received(WorkerId("router"), start)]
    while events:
        for effect in actor.handle(events.pop(), 0.0):
            if runs_prefill(effect):
                found += effect.ships
                waiting.append(effect.plan)
            elif isinstance(effect, ShipKV):
                found.append(effect.transfer)
        if waiting:
            plan = waiting.pop(0)
            drawn = tuple((each.request_id, Sampled(5)) for each in plan.prefill.chunks if each.last)
            events = [StepDone(plan.step_id, first=drawn)]
    return found


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([TransferMode.WHOLE, TransferMode.CHUNK, TransferMode.LAYER]),
    st.sampled_from([8, 16, 24, 64]),
    st.sampled_from([8, 16, 32, 64]),
    st.integers(1, 500),
    st.sampled_from([32, 40, 256]),
    st.integers(0, 4),
)
def test_every_token_leaves_once_and_lands_where_it_belongs(mode, ours, theirs, tokens, chunk, cached):
    cached = min(cached, tokens // theirs)
    parts = shipped(mode, ours, theirs, tokens, chunk, cached)
    for layers in sorted({part.layers for part in parts}, key=str):
        group = lcm(ours, theirs)
        reached = cached * theirs // group * group  # the group that is held in part leaves whole
        for part in (each for each in parts if each.layers == layers):
            assert len(part.source_pages) == -(-part.num_tokens // ours)
            assert len(part.destination_pages) == -(-part.num_tokens // theirs)
            for index, page in enumerate(part.destination_pages, reached // theirs):
                assert page == (NULL_PAGE if index < cached else 1000 + index)
            reached += part.num_tokens
            assert reached % group == 0 or reached == tokens
        assert reached == tokens
    assert len({part.layers for part in parts}) <= (len(GROUPS) if mode is TransferMode.LAYER else 1)


def test_a_chunk_that_ends_within_a_page_of_the_destination_keeps_its_last_pages():
    parts = shipped(TransferMode.CHUNK, 16, 64, 100, chunk=40)
    assert [(len(part.source_pages), part.destination_pages) for part in parts] == [(4, (1000,)), (3, (1001,))]


def test_a_worker_that_is_told_nothing_takes_the_pages_for_its_own_size():
    assert shipped(TransferMode.CHUNK, 16, 16, 90, 40, told=0) == shipped(TransferMode.CHUNK, 16, 16, 90, 40)


def test_a_reservation_says_how_large_its_pages_are():
    config = worker("decode-0", Role.DECODE, page_size=8)
    request = Request(RequestId("a"), (1, 2, 3), SamplingParams(max_tokens=4))
    effects = Worker(config).handle(Received(WorkerId("router"), reserve_for(A1, request, 0, THERE, 9.0)), 0.0)
    said = [effect.message for effect in effects if isinstance(effect, Send)]
    assert [message.page_size for message in said if isinstance(message, Reserved)] == [8]
