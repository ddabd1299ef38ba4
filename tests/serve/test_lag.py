"""The watch on the event loop sees what holds it."""

from __future__ import annotations

import asyncio
import contextlib
import time

from jdisagg.serve.observability import health
from jdisagg.serve.observability.metrics import Metrics


def test_a_loop_that_is_held_is_late_by_as_long() -> None:
    on_late: list[float] = []

    async def held() -> None:
        watch = asyncio.create_task(health.watch(on_late.append))
        await asyncio.sleep(0.05)
        time.sleep(0.3)
        await asyncio.sleep(0.05)
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch

    asyncio.run(held())
    assert 0.25 < max(on_late) < 5 and sorted(on_late)[0] < 0.1


def test_the_lag_is_a_metric() -> None:
    metrics = Metrics("m")
    metrics.lagged(0.3)
    assert 'jdisagg_event_loop_lag_seconds_bucket{le="0.5",model_name="m"} 1.0' in metrics.render().decode()
