"""Transfer statistics: what `auto` has measured of shipping KV, of this process's workers and as others report it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jdisagg.core.errors import BadTicket
from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import Role
from jdisagg.policy.worker import Worker

TransferStats = dict[WorkerId, dict[str, str]]  # by worker: "streaming" and "wires"
MOST_CHARS = 500


def transfer_stats_of(actors: Mapping[WorkerId, Any]) -> TransferStats:
    """Of those that ship. From any thread: what is read are single numbers."""
    workers = {name: actor for name, actor in actors.items() if isinstance(actor, Worker)}
    return {name: _described(worker) for name, worker in workers.items() if worker.config.role is Role.PREFILL}


def _described(worker: Worker) -> dict[str, str]:
    streaming = worker.prefill_side.shipping.streaming
    fixed = f"--transfer={worker.config.transfer}: nothing to learn"
    return {
        "streaming": fixed if streaming is None else streaming.describe(),
        "wires": f"--transfer_compress={worker.config.compress}: {worker.prefill_side.shipping.wires.describe()}",
    }


def read_transfer_stats(reported: Any) -> TransferStats:
    """What another process reports of its workers. Raises BadTicket where it is nothing of the kind."""
    try:
        return {
            WorkerId(str(worker)): {str(name)[:40]: str(text)[:MOST_CHARS] for name, text in of.items()}
            for worker, of in reported.items()
        }
    except AttributeError as error:
        raise BadTicket(f"a peer's transfer statistics cannot be read: {error}") from error
