"""What the router tells workers to do for a row: reserve for it, and compute its prompt."""

from __future__ import annotations

from jdisagg.core.messages import Reserve, Reserved, StartPrefill
from jdisagg.core.router_config import RouterConfig
from jdisagg.policy.request_state import RequestState


def reserve(row: RequestState, config: RouterConfig) -> Reserve:
    assert row.prefill is not None, "a reservation is for what some worker computes"
    return Reserve(row.attempt, row.to_prefill(), row.num_before, row.prefill, config.lease_s)


def start_prefill(row: RequestState, reservation: Reserved, config: RouterConfig) -> StartPrefill:
    assert row.prefill is not None and row.decode is not None, "a reserved row has its pair"
    return StartPrefill(
        attempt=row.attempt,
        request=row.to_prefill(),
        num_output=row.num_before,
        decode_worker=row.decode,
        decode_pages=reservation.pages,
        timeout_s=config.prefill_timeout_s,
        lease_s=config.lease_s,
        cached_pages=reservation.cached_pages,
        decode_page_size=reservation.page_size,
    )
