"""What the next plan holds, as pure functions over views: order, packing, page counts, victims."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from jdisagg.core.request import SamplingParams
from jdisagg.core.steps import History
from jdisagg.core.worker_config import WorkerConfig

HEAD_START_S = 2.0  # that a step of priority is worth


class OrderKey(NamedTuple):
    """The one order of requests everywhere: arrival, as priority moves it. It outlives preemption.

    Priority is a head start and no rank: however many come behind with a better one, who waits is overtaken by those
    of the next seconds only, so that nobody starves.
    """

    due_s: float
    arrival_s: float
    request_id: str


class RequestSize(Protocol):
    """What is known of a request where its prompt is not: a Request itself, or a Reserve."""

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
    """KV tokens at the latest possible end; the last token drawn is never fed."""
    return request.prompt_tokens + request.sampling.max_tokens - 1


def predicted_tokens(request: RequestSize, reserve_tokens: int) -> int:
    """KV tokens that pages are reserved for: the prompt and the first `reserve_tokens` of the output."""
    output = max(1, min(request.sampling.max_tokens, reserve_tokens))
    return request.prompt_tokens + output - 1


def predicted_pages(request: RequestSize, config: WorkerConfig) -> int:
    return config.pages_for(predicted_tokens(request, config.reserve_tokens))


def readable_pages(request: RequestSize, config: WorkerConfig) -> int:
    """Leading pages of the prompt that may be read where it is prefilled, not computed: never that of its last token,
    and none where something of every token is asked for."""
    return 0 if request.sampling.whole_prompt else (request.prompt_tokens - 1) // config.page_size


def tail_tokens(request: RequestSize, config: WorkerConfig) -> int:
    """Last tokens of the prompt that its decode worker needs: all where drawing or a draft looks back at them; else
    those in no full page, where later pages are named for their content."""
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
    """Prompt and output of a request whose last `num_output` prompt tokens are earlier output; empty if unneeded.

    drafted: what it may draw next is guessed from all of them.
    """
    if not (sampling.recalls or drafted):
        return History()
    cut = len(prompt) - num_output
    return History(prompt[:cut] if sampling.penalised or drafted else (), prompt[cut:] + drawn)
