"""Who may say what to whom, and which numbers a word can have."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from jdisagg.core.errors import SenselessWord
from jdisagg.core.messages import (
    Abort,
    AbortAck,
    Ack,
    Adopt,
    CacheChanged,
    CacheHeld,
    CacheWanted,
    Commit,
    FetchPages,
    Holder,
    Leave,
    Message,
    NoPages,
    Priced,
    Renew,
    Resend,
    Reserve,
    StartPrefill,
    View,
)
from jdisagg.core.protocol import FROM_FRONT, TO_ROUTER, check_transfer, check_word
from jdisagg.core.request import Attempt, RequestId, Sampled, SamplingParams, WorkerId
from jdisagg.core.steps import KVTransfer
from jdisagg.core.tiers import Tier
from jdisagg.core.worker_config import Role, WorkerConfig
from tests.sim.cases import request, worker

A1 = Attempt(RequestId("a"), 1)

P, D, BOTH = (worker(f"{role.value}-0", role) for role in (Role.PREFILL, Role.DECODE, Role.COLOCATED))
COMMIT, START = (
    Commit(A1, Sampled(1), 6, 1),
    StartPrefill(A1, request("a"), 0, D.worker, (1,), 1.0, 1.0),
)
RESERVE = Reserve(A1, 6, SamplingParams(), 0, P.worker, 1.0)


@pytest.mark.parametrize(
    ("word", "ways"),
    [
        (COMMIT, {(P, D), (P, BOTH), (BOTH, D), (BOTH, BOTH)}),
        (Renew(A1), {(P, D), (P, BOTH), (BOTH, D), (BOTH, BOTH)}),
        (Ack(A1), {(D, P), (BOTH, P), (D, BOTH), (BOTH, BOTH)}),
        (Resend(A1, 0), {(D, P), (BOTH, P), (D, BOTH), (BOTH, BOTH)}),
        (
            Abort(A1, ""),
            {(a, b) for a in (P, D, BOTH, None) for b in (P, D, BOTH, None)} - {(None, None)},
        ),
        (
            AbortAck(A1),
            {(a, b) for a in (P, D, BOTH, None) for b in (P, D, BOTH, None)} - {(None, None)},
        ),
        (START, {(None, P), (None, BOTH)}),
        (RESERVE, {(None, P), (None, D), (None, BOTH)}),
        (View(1, 1, 0, 0), {(P, None), (D, None), (BOTH, None)}),
        (CacheWanted(), {(None, P), (None, D), (None, BOTH)}),
        (CacheHeld(0, b""), {(P, None), (D, None), (BOTH, None)}),
        (CacheChanged(1, 0), {(P, None), (D, None), (BOTH, None)}),
        (Priced((("dram", 0.0, 0.1),)), {(P, None), (D, None), (BOTH, None)}),
        (FetchPages(A1, b"", 0), {(a, b) for a in (P, D, BOTH) for b in (P, D, BOTH)}),
        (NoPages(A1), {(a, b) for a in (P, D, BOTH) for b in (P, D, BOTH)}),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_word_goes_one_way_and_no_other(word: Message, ways: set[tuple[WorkerConfig | None, WorkerConfig | None]]):
    for sender in (P, D, BOTH, None):
        for to in (P, D, BOTH, None):
            if (sender, to) in ways:
                check_word(word, sender, to)
            else:
                with pytest.raises(SenselessWord, match=f"{type(word).__name__}: is not for"):
                    check_word(word, sender, to)


def test_a_decode_worker_is_told_to_compute_only_where_it_has_programs_for_it():
    check_word(START, None, replace(D, short_prompt_tokens=8))
    with pytest.raises(SenselessWord, match=r"decode-0 .*computes no prompts"):
        check_word(START, None, D)


def test_every_message_is_for_somebody():
    between = {Commit, Renew, Ack, Resend, StartPrefill, Reserve, CacheWanted, Leave, Adopt}
    between |= {FetchPages, NoPages}
    assert set(Message.__args__) == between | set(TO_ROUTER) | set(FROM_FRONT)


PART = KVTransfer(A1, P.worker, D.worker, (1, 2), (3, 0), 8)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"source_pages": (-1,)}, "source_pages are -1"),
        ({"destination_pages": (1, 65)}, "destination_pages are 1 to 65, there are 64"),
        ({"num_tokens": -1}, "num_tokens is -1"),
        ({"part": -1}, "part is -1"),
        ({"attempt": Attempt(RequestId("a"), -1)}, "epoch is -1"),
        ({"layers": (2, 1)}, r"layers are \(2, 1\)"),
        ({"layers": (0, 10**6)}, "layers are"),
        ({"wire": "telegraph"}, "wire is 'telegraph', known are raw"),
        ({"source": WorkerId("x")}, "from 'x' to 'decode-0'"),
        ({"destination": WorkerId("x")}, "to 'x'"),
    ],
)
def test_a_part_for_pages_that_are_not_or_of_somebody_else_is_refused(changed: dict[str, Any], says: str):
    check_transfer(PART, P, D)
    with pytest.raises(SenselessWord, match=says):
        check_transfer(replace(PART, **changed), P, D)


def test_kv_goes_from_who_prefills_to_who_decodes():
    with pytest.raises(SenselessWord, match="is not for"):
        check_transfer(replace(PART, source=D.worker, destination=P.worker), D, P)


@pytest.mark.parametrize(
    ("word", "sender", "to", "says"),
    [
        (replace(COMMIT, num_tokens=10**9), P, D, "num_tokens is 1000000000"),
        (replace(COMMIT, layers=((3, 1),)), P, D, "layers are"),
        (replace(COMMIT, first=Sampled(-2)), P, D, "-2 is no token"),
        (replace(COMMIT, attempt=Attempt(RequestId("a"), -1)), P, D, "epoch is -1"),
        (Ack(A1, math.inf), D, P, "wire_s is inf"),
        (Resend(A1, -1), D, P, "part is -1"),
        (replace(RESERVE, lease_s=math.inf), None, D, "lease_s is inf"),
        (replace(START, request=replace(request("a"), prompt=())), None, P, "a prompt of 0 tokens"),
        (replace(START, request=replace(request("a"), prompt=(-5,))), None, P, "-5 is no token"),
        (replace(START, decode_pages=(-5,)), None, P, "decode_pages"),
        (replace(START, tail_tokens=7), None, P, "tail_tokens is 7 of 6"),
        (replace(RESERVE, prompt_tokens=0), None, D, "a prompt of 0 tokens, the limit is 128"),
        (replace(RESERVE, prompt_tokens=129), None, D, "a prompt of 129 tokens, the limit is 128"),
        (replace(RESERVE, page_names=b"short"), None, D, "page_names are 5 bytes, 1 pages have 16"),
        (replace(COMMIT, tail=(1,) * 7), P, D, "a tail of 7 tokens of 6"),
        (replace(COMMIT, tail=(-3,)), P, D, "-3 is no token"),
        (CacheChanged(1, 0, b"x"), D, None, "names are 1 bytes, of at most 64 pages of 16"),
        (CacheChanged(1, 0, b"", bytes(65 * 16)), D, None, "names are 1040 bytes, of at most 64 pages"),
        (CacheHeld(1, bytes(65 * 16)), D, None, "names are 1040 bytes, of at most 64 pages"),
        (CacheHeld(1, b"", 1, 1), D, None, "part 1 of 1"),
        (CacheHeld(1, b"", 0, 2), D, None, "part 0 of 2"),
        (CacheHeld(-1, b""), D, None, "number is -1"),
        (CacheHeld(1, bytes(16), tier=Tier.DRAM), D, None, "names are 16 bytes, of at most 0 pages"),
        (Priced((("dram", 0.0, -0.1),)), D, None, "1 prices, of which the first are"),
        (Priced((("dram", 0.0, math.nan),)), D, None, "1 prices, of which the first are"),
        (FetchPages(A1, bytes(65 * 16), 0), P, D, "names are 1040 bytes, of at most 32 pages"),
        (FetchPages(A1, b"", -1), P, D, "first is -1"),
        (replace(START, holders=(Holder(D.worker, 2, 2),)), None, P, "1 holders, of which the first are"),
        (replace(RESERVE, holders=(Holder(P.worker, 0, 1),) * 5), None, D, "5 holders, of which the first are"),
    ],
)
def test_numbers_that_cannot_be_are_refused_by_their_field(
    word: Message, sender: WorkerConfig | None, to: WorkerConfig | None, says: str
):
    with pytest.raises(SenselessWord, match=says):
        check_word(word, sender, to)
