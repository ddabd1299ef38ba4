"""Workers, requests and checks that tests of actors share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jdisagg.core.messages import Abort
from jdisagg.core.request import FinishReason, Request, RequestId, SamplingParams, WorkerId
from jdisagg.core.worker_config import Ring, Role, Stages, WorkerConfig
from jdisagg.engine.toy import VOCAB, toy_output
from tests.sim.world import World

NATURAL = (FinishReason.STOP, FinishReason.LENGTH)


def worker(name: str, role: Role, **sizes: Any) -> WorkerConfig:
    """A small worker: 64 pages of 4 tokens, 4 slots."""
    given = {
        "num_pages": 64,
        "page_size": 4,
        "max_model_len": 128,
        "num_slots": 4,
        "prefill_buckets": (8, 16),
        "table_buckets": (4, 8, 32),
        "max_chunk_seqs": 4,
        **sizes,
    }
    return WorkerConfig(worker=WorkerId(name), role=role, **given)


def pair(**sizes: Any) -> list[WorkerConfig]:
    return [worker("prefill-0", Role.PREFILL, **sizes), worker("decode-0", Role.DECODE, **sizes)]


def ring(steps: int = 4, **sizes: Any) -> list[WorkerConfig]:
    """A pair whose decode worker is a ring that takes up to `steps` steps per dispatch."""
    sizes = {**sizes, "decode": Stages()}
    drawn = {**sizes, "decode": Ring(2, steps), "draft_tokens": 0, "mixed_steps": False}
    one, other = worker("prefill-0", Role.PREFILL, **sizes), worker("decode-0", Role.DECODE, **drawn)
    other.check()
    return [one, other]


def joint(steps: int = 4, **sizes: Any) -> list[WorkerConfig]:
    """A pair whose decode worker takes all slots through two stages, up to `steps` times per dispatch."""
    sizes = {**sizes, "decode": Stages()}
    drawn = {**sizes, "decode": Stages(2, steps), "draft_tokens": 0, "mixed_steps": False}
    one, other = worker("prefill-0", Role.PREFILL, **sizes), worker("decode-0", Role.DECODE, **drawn)
    other.check()
    return [one, replace(other, stage_admission=False)]


def colocated(**sizes: Any) -> list[WorkerConfig]:
    return [worker("colocated-0", Role.COLOCATED, **sizes)]


def turning(steps: int = 4, **sizes: Any) -> list[WorkerConfig]:
    """A colocated worker of one stage that takes up to `steps` steps per dispatch and verifies no drafts."""
    return colocated(**{**sizes, "decode": Stages(1, steps), "draft_tokens": 0})


def choosing(steps: int = 3, **sizes: Any) -> list[WorkerConfig]:
    """A colocated worker of one stage that takes up to `steps` steps per dispatch, or verifies drafts of a model if
    those are faster: n-grams of a toy's tokens follow from no text."""
    drafts = {"draft_tokens": 3, "draft_auto": True}
    return colocated(**{**drafts, **sizes, "decode": Stages(1, steps)})


def request(
    name: str, prompt_tokens: int = 6, *, priority: int = 0, arrival_s: float = 0.0, **sampling: Any
) -> Request:
    """A request whose prompt follows from its name."""
    prompt = tuple((7 * i + sum(map(ord, name))) % VOCAB for i in range(prompt_tokens))
    params = SamplingParams(**{"max_tokens": 8, **sampling})
    return Request(RequestId(name), prompt, params, arrival_s=arrival_s, priority=priority)


def definition(each: Request) -> list[int]:
    return toy_output(each.prompt, each.sampling)


def stopping(name: str, prompt_tokens: int = 6, *, after: int, **sampling: Any) -> Request:
    """A request whose `after`th output token is a stop token, and none before."""
    plain = definition(request(name, prompt_tokens, **{"max_tokens": 64, **sampling}))
    assert plain[after - 1] not in plain[: after - 1], f"{name} repeats a token: choose another name"
    return request(name, prompt_tokens, stop_token_ids=(plain[after - 1],), **{"max_tokens": 64, **sampling})


def reasons(world: World, each: Request) -> list[FinishReason]:
    return [finish.reason for finish in world.finished.get(each.request_id, [])]


def check_ended(world: World, requests: Sequence[Request]) -> None:
    """Each ended once; what a client got is the definition, to its end where the end is a natural one.

    In a calm world all was given back by word of mouth: no lease had to run out for it.
    """
    check_outputs(world, requests)
    expired = [message for message in sent(world, Abort) if message.reason is FinishReason.TIMEOUT]
    assert not (world.injector.faults.calm and expired), expired


def check_outputs(world: World, requests: Sequence[Request]) -> None:
    """As `check_ended`, of a world in which deadlines may have run out."""
    for each in requests:
        ends = reasons(world, each) + [FinishReason.ABORT for _ in world.rejected.get(each.request_id, [])]
        assert len(ends) == 1, f"{each.request_id} ended as {ends}"
        expected, output = definition(each), world.output(each.request_id)
        assert output == expected[: len(output)]
        if ends[0] in NATURAL:
            assert output == expected
            stopped = expected[-1] in each.sampling.stop_token_ids
            assert ends[0] is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    world.check_all_ended()


def run_all(world: World, requests: Sequence[Request]) -> None:
    """Submits all at their arrival, runs to the end, and expects natural ends."""
    for each in requests:
        world.submit(each, each.arrival_s)
    world.run()
    check_ended(world, requests)
    assert all(reasons(world, each)[0] in NATURAL for each in requests), world.finished


def sent(world: World, kind: type) -> list[Any]:
    """Messages of one kind, in the order of their sending."""
    messages = [getattr(effect, "message", None) for _, _, effect in world.effects]
    return [message for message in messages if isinstance(message, kind)]
