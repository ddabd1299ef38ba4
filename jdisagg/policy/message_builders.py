"""What the router tells workers to do for a row: reserve for it, and compute its prompt."""

from __future__ import annotations

from jdisagg.core.messages import Holder, Reserve, Reserved, StartPrefill
from jdisagg.core.request import Attempt, Request, WorkerId
from jdisagg.core.router_config import RouterConfig
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.planning import tail_tokens
from jdisagg.policy.prefix_cache import PageHash, packed
from jdisagg.policy.request_state import RequestState


def reserve_for(
    attempt: Attempt,
    request: Request,
    num_output: int,
    prefill_worker: WorkerId,
    lease_s: float,
    page_names: tuple[PageHash, ...] = (),
    holders: tuple[Holder, ...] = (),
) -> Reserve:
    return Reserve(
        attempt=attempt,
        prompt_tokens=request.prompt_tokens,
        sampling=request.sampling,
        num_output=num_output,
        prefill_worker=prefill_worker,
        lease_s=lease_s,
        arrival_s=request.arrival_s,
        priority=request.priority,
        cache_salt=request.salt,
        page_names=packed(page_names),
        holders=holders,
    )


def reserve(
    row: RequestState,
    decode: WorkerConfig,
    config: RouterConfig,
    holders: tuple[Holder, ...] = (),
) -> Reserve:
    """`decode` looks the prompt's beginning up by its own pages."""
    assert row.prefill is not None, "a reservation is for what some worker computes"
    names = row.page_names(decode.page_size) if decode.prefix_caching else ()
    request = row.to_prefill()
    return reserve_for(row.attempt, request, row.num_before, row.prefill, config.lease_s, names, holders)


def start_prefill(
    row: RequestState,
    reservation: Reserved,
    decode: WorkerConfig,
    config: RouterConfig,
    holders: tuple[Holder, ...] = (),
) -> StartPrefill:
    assert row.prefill is not None and row.decode is not None, "a reserved row has its pair"
    request = row.to_prefill()
    return StartPrefill(
        attempt=row.attempt,
        request=request,
        num_output=row.num_before,
        decode_worker=row.decode,
        decode_pages=reservation.pages,
        timeout_s=config.prefill_timeout_s,
        lease_s=config.lease_s,
        cached_pages=reservation.cached_pages,
        decode_page_size=reservation.page_size,
        tail_tokens=tail_tokens(request, decode),
        holders=holders,
    )
