"""The small worlds: who is in them, what clients ask, and how much may go wrong."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from jdisagg.core.request import Request, RequestId, SamplingParams, WorkerId
from jdisagg.core.router_config import RouterConfig
from jdisagg.core.worker_config import Role, TransferMode, WorkerConfig

STOP_TOKEN = 999


class Budget(NamedTuple):
    """How often each thing may go wrong in one life of a world."""

    loss: int = 0  # a message or KV never arrives
    dup: int = 0  # it arrives, and again at any later time
    flip: int = 0  # KV arrives broken, and the digest tells
    torn: int = 0  # pages that were on their way between tiers come broken
    burst: int = 0  # a transfer fails, and its source is told
    fail: int = 0  # a plan fails, and every plan that is sent before its worker hears of it
    late: int = 0  # it is overtaken by whatever comes behind it
    early: int = 0  # a timer fires though something else could still happen, or before an earlier one
    restart: int = 0  # a worker starts anew, empty, and nobody is told
    lose: int = 0  # a worker is gone for good, and the router is told at some time
    back: int = 0  # a worker that was lost joins again, empty
    leave: int = 0  # the router starts anew, every stream to it breaks, and its workers join again once they notice
    reboot: int = 0  # the router starts anew; its clients see their connections cut
    cancel: int = 0  # a client goes away
    stop: int = 0  # what a client was told ends its answer, as it finds at some time
    again: int = 0  # a client whose connection was cut asks again, under the same id
    change: int = 0  # a worker is to become what `Scene.changes` says


@dataclass(frozen=True)
class Scene:
    workers: tuple[WorkerConfig, ...]
    requests: tuple[Request, ...]
    outputs: dict[RequestId, tuple[int, ...]]
    budget: Budget
    router: RouterConfig
    slow: bool = False  # prefill plans take any time: timers fire meanwhile, in their order
    any_order: bool = False  # messages of one pair of actors may overtake each other, always
    changes: tuple[WorkerConfig, ...] = ()  # what workers may become

    def but(self, **changes: Any) -> Scene:
        """Another scene: fields of the budget by their names, the rest as in `replace`."""
        names = {each.name for each in fields(self)}
        limits = {name: value for name, value in changes.items() if name not in names}
        rest = {name: value for name, value in changes.items() if name in names}
        return replace(self, budget=self.budget._replace(**limits), **rest)


# Durations are small whole numbers, and the longer wait of two that include each other is the longer one.
ROUTER = RouterConfig(
    queue_limit=4,
    queue_timeout_s=16.0,
    handoff_timeout_s=2.0,
    lease_s=3.0,
    prefill_timeout_s=5.0,
    stall_timeout_s=4.0,
    max_retries=1,
    abort_tries=1,
    capacity_retry_s=1.0,
)


def worker(name: str, role: Role, **sizes: Any) -> WorkerConfig:
    """Two tokens a page, chunks of two tokens, and as few pages and slots as will do."""
    given = {
        "num_pages": 3,
        "page_size": 2,
        "max_model_len": 8,
        "num_slots": 1,
        "prefill_buckets": (2,),
        "table_buckets": (4,),
        "max_chunk_seqs": 2,
        "steps_in_flight": 1,
        "chunks_in_flight": 1,
        "reservations_ahead": 1,
        "reserve_tokens": 1,
        "ack_timeout_s": 4.0,
        "part_timeout_s": 1.0,
        "part_tries": 1,
        "transfer": TransferMode.LAYER,
        "layer_groups": ((0, 1), (1, 2)),
        **sizes,
    }
    return WorkerConfig(worker=WorkerId(name), role=role, **given)


def request(number: int, prompt_tokens: int = 4, max_tokens: int = 2, **more: Any) -> Request:
    """A prompt of two chunks."""
    prompt = tuple(range(100 * number + 50, 100 * number + 50 + prompt_tokens))
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, **more)
    return Request(RequestId(f"r{number}"), prompt, sampling)


def outputs_of(requests: tuple[Request, ...]) -> dict[RequestId, tuple[int, ...]]:
    """What each draws, were it to go on: r1 draws 100, 101, 102 ..."""
    return {each.request_id: tuple(each.prompt[0] - 50 + i for i in range(16)) for each in requests}


def scene(workers: list[WorkerConfig], requests: list[Request], **budget: int) -> Scene:
    return Scene(tuple(workers), tuple(requests), outputs_of(tuple(requests)), Budget(**budget), ROUTER)


def twins(count: int, prompt_tokens: int = 4) -> list[Request]:
    """Requests of one and the same prompt, and so of one answer."""
    first = request(1, prompt_tokens)
    return [replace(first, request_id=RequestId(f"r{number + 1}")) for number in range(count)]


def disaggregated(num_requests: int = 1, requests: list[Request] | None = None, **sizes: Any) -> Scene:
    """One prefill and one decode worker."""
    workers = [worker("prefill", Role.PREFILL, **sizes), worker("decode", Role.DECODE, **sizes)]
    return scene(workers, requests or [request(number + 1) for number in range(num_requests)])


def colocated(
    num_requests: int = 2, num_workers: int = 2, requests: list[Request] | None = None, **sizes: Any
) -> Scene:
    """Workers that do both."""
    workers = [worker(f"both{number + 1}", Role.COLOCATED, **sizes) for number in range(num_workers)]
    return scene(workers, requests or [request(number + 1) for number in range(num_requests)])
