"""The order of requests and their sizes in tokens and pages, as pure functions."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from jdisagg.core.request import SamplingParams
from jdisagg.core.steps import History
from jdisagg.core.worker_config import WorkerConfig

HEAD_START_S = 2.0  # head start of one step of priority


class OrderKey(NamedTuple):
    """The sort key of requests everywhere: arrival time, moved by priority. It survives preemption.

    Priority is a head start, not a rank: a waiting request is overtaken only by better ones of the next seconds,
    however many follow, so that none starves."""

    due_s: float
    arrival_s: float
    request_id: str


class RequestSize(Protocol):
    """The size of a request without its prompt: a Request itself, or a Reserve."""

    @property
    def request_id(self) -> str: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def sampling(self) -> SamplingParams: ...
    @property
    def arrival_s(self) -> float: ...
    @property
    def priority(self) -> int: ...


def order_of(request: RequestSize) -> OrderKey:
    return OrderKey(request.arrival_s + HEAD_START_S * request.priority, request.arrival_s, request.request_id)


def full_tokens(request: RequestSize) -> int:
    """Returns the KV tokens at the latest possible end; the last token drawn is never fed."""
    return request.prompt_tokens + request.sampling.max_tokens - 1


def predicted_tokens(request: RequestSize, reserve_tokens: int) -> int:
    """Returns the KV tokens to reserve pages for: the prompt and the first `reserve_tokens` of the output."""
    output = max(1, min(request.sampling.max_tokens, reserve_tokens))
    return request.prompt_tokens + output - 1


def predicted_pages(request: RequestSize, config: WorkerConfig) -> int:
    return config.pages_for(predicted_tokens(request, config.reserve_tokens))


def readable_pages(request: RequestSize, config: WorkerConfig) -> int:
    """Returns the number of leading prompt pages that may be read from a cache: never the page of the last token, and
    none if outputs for every prompt token are requested."""
    return 0 if request.sampling.whole_prompt else (request.prompt_tokens - 1) // config.page_size


def tail_tokens(request: RequestSize, config: WorkerConfig) -> int:
    """Returns the number of last prompt tokens that the decode worker needs: all if sampling or drafts depend on them;
    else those behind the last full page, from which the hashes of later pages follow."""
    if request.sampling.recalls or (config.draft_tokens and request.sampling.speculative):
        return request.prompt_tokens
    return request.prompt_tokens % config.page_size if config.prefix_caching else 0


def history_of(
    prompt: tuple[int, ...],
    sampling: SamplingParams,
    num_output: int,
    drawn: tuple[int, ...] = (),
    *,
    drafted: bool = False,
) -> History:
    """Returns prompt and output of a request whose last `num_output` prompt tokens are earlier output; empty if
    unneeded.

    drafted: drafts for it are derived from all tokens."""
    if not (sampling.recalls or drafted):
        return History()
    cut = len(prompt) - num_output
    return History(prompt[:cut] if sampling.penalised or drafted else (), prompt[cut:] + drawn)
