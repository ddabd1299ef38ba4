"""What the router tells workers to do for a row: hold a bed, and compute its prompt."""

from __future__ import annotations

from jdisagg.core.messages import Reserve, Reserved, StartPrefill
from jdisagg.core.router_config import RouterConfig
from jdisagg.policy.rows import Row


def reserve(row: Row, config: RouterConfig) -> Reserve:
    assert row.prefill is not None, "a bed is for what some worker computes"
    return Reserve(*row.owner, row.to_prefill(), row.num_before, row.prefill, config.lease_s)


def start_prefill(row: Row, bed: Reserved, config: RouterConfig) -> StartPrefill:
    assert row.prefill is not None and row.decode is not None, "a reserved row has its pair"
    return StartPrefill(
        handoff=row.owner.handoff,
        epoch=row.epoch,
        request=row.to_prefill(),
        num_output=row.num_before,
        decode_worker=row.decode,
        decode_pages=bed.pages,
        timeout_s=config.prefill_timeout_s,
        lease_s=config.lease_s,
        cached_pages=bed.cached_pages,
        decode_page_size=bed.page_size,
    )
