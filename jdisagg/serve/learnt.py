"""What workers have learnt of shipping KV, in words: of this process's from their actors, of others' by tidings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jdisagg.core.errors import BadTicket
from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import Role
from jdisagg.policy.worker import Worker

Learnt = dict[WorkerId, dict[str, str]]  # by worker: "streaming" and "wires"
MOST_CHARS = 500


def learnt_by(actors: Mapping[WorkerId, Any]) -> Learnt:
    """Of those that ship. From any thread: what is read are single numbers."""
    workers = {name: actor for name, actor in actors.items() if isinstance(actor, Worker)}
    return {name: _words(worker) for name, worker in workers.items() if worker.config.role is Role.PREFILL}


def _words(worker: Worker) -> dict[str, str]:
    streaming = worker.prefill_side.streaming
    fixed = f"--transfer={worker.config.transfer}: nothing to learn"
    return {
        "streaming": fixed if streaming is None else streaming.describe(),
        "wires": f"--transfer_compress={worker.config.compress}: {worker.prefill_side.wires.describe()}",
    }


def read_learnt(told: Any) -> Learnt:
    """What another process says of its workers. Raises BadTicket where it is nothing of the kind."""
    try:
        return {
            WorkerId(str(worker)): {str(name)[:40]: str(words)[:MOST_CHARS] for name, words in of.items()}
            for worker, of in told.items()
        }
    except AttributeError as error:
        raise BadTicket(f"a peer has learnt what cannot be read: {error}") from error
