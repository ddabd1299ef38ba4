"""Workers as an operator sees them (GET /admin/workers): role, mesh and state of each, and role changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

from jdisagg.core.errors import ConfigError, JdisaggError, RequestError
from jdisagg.core.events import ROUTER, ChangeRole, WorkerStands
from jdisagg.core.layout.reshard import StageShape
from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.worker.drain import WorkerStatus
from jdisagg.serve.deploy.deployment import WorkerShapes
from jdisagg.serve.driver.autoscaling import Autoscaling
from jdisagg.serve.driver.role_change import ReshapeTimes


@dataclass(frozen=True, slots=True)
class Place:
    """One worker that is present now. `stages` are its pipeline stages; layer groups on one mesh are one stage."""

    config: WorkerConfig
    stages: tuple[StageShape, ...] = ()
    remote: bool = False  # the worker runs in another process
    leaving: bool = False  # the worker drains and gets no new requests

    def to_json(self) -> dict[str, Any]:
        config = self.config
        return {
            "worker": config.worker,
            "role": config.role.value,
            "remote": self.remote,
            "leaving": self.leaving,
            "page_size": config.page_size,
            "num_pages": config.num_pages,
            "num_slots": config.num_slots if config.role.decodes else 0,
            "labels": str(config.labels),
            "stages": [{"layers": [each.layers.start, each.layers.stop], "shards": each.tp} for each in self.stages],
        }


def place_of(
    config: WorkerConfig, groups: Sequence[StageShape], *, remote: bool = False, leaving: bool = False
) -> Place:
    """Returns the worker's view; `groups` are the layer groups of its pages, a draft model's among them."""
    stages = tuple(each for each in groups if not each.draft)
    if config.pipeline_stages == config.decode.n == 1 and len(stages) > 1:
        layers = range(stages[0].layers.start, stages[-1].layers.stop)
        stages = (StageShape(layers, stages[0].tp, stages[0].page_size, stages[0].dtype),)
    return Place(config, stages, remote, leaving)


ANSWER_S = 10.0  # the longest wait for the router to accept or refuse a change


class NoSuchWorker(RequestError):
    """There is no worker of this name (HTTP 404)."""


class RoleConflict(JdisaggError):
    """The worker cannot leave now: it is the last of its phase, or leaves already (HTTP 409)."""


@dataclass(slots=True)
class Change:
    """The last role change of one worker: wall-clock seconds at which it reached each state, and what failed."""

    standing: str = WorkerStatus.SERVING.value
    at: dict[str, float] = field(default_factory=dict[str, float])
    why: str = ""


@dataclass
class Pools:
    """The workers of all processes, and requests to drain them or to change their roles.

    `post` queues an event on the router's driver; `places` and `shapes` return the workers that are present now. HTTP
    routes use it on the event loop; `stood` is called on the driver's thread.
    """

    post: Callable[[WorkerId, ChangeRole], None]
    places: Callable[[], list[Place]]
    shapes: Callable[[], Mapping[WorkerId, WorkerShapes]]
    times: Callable[[], Mapping[WorkerId, ReshapeTimes]]
    scaling: Autoscaling | None = None  # the autoscaler, which changes roles by itself
    _changes: dict[WorkerId, Change] = field(default_factory=dict[WorkerId, Change])
    _numbers: count[int] = field(default_factory=lambda: count(1))
    _pending: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Future[WorkerStands]]] = field(default_factory=dict)

    # ------------------------------------------------------------ views

    def described(self) -> list[dict[str, Any]]:
        shapes, times = self.shapes(), self.times()
        return [self._described(info, shapes.get(info.config.worker), times) for info in self.places()]

    def _described(
        self, info: Place, shapes: WorkerShapes | None, times: Mapping[WorkerId, ReshapeTimes]
    ) -> dict[str, Any]:
        worker = info.config.worker
        change = self._changes.get(worker, Change("leaving" if info.leaving else WorkerStatus.SERVING.value))
        took = times.get(worker)
        return info.to_json() | {
            "standing": change.standing,
            "can_be": [] if shapes is None else [*shapes.able],
            "changed_at": dict(change.at),
            "why": change.why,
            "took": None if took is None else asdict(took),
        }

    # ------------------------------------------------------------ changes

    async def drain(self, worker: str, drain_s: float) -> dict[str, Any]:
        """Drains the worker: it gets no new requests, and after `drain_s` its sequences move. Raises as `change`."""
        self._check_present(worker)
        return await self._request(WorkerId(worker), None, drain_s)

    async def change(self, worker: str, role: str, mesh: str, drain_s: float) -> dict[str, Any]:
        """Changes the worker's role and mesh on its devices. Raises NoSuchWorker, RequestError, RoleConflict."""
        try:
            config = self._shapes_of(worker).find(role, mesh).config
        except ConfigError as error:
            raise RequestError(str(error), param="mesh" if mesh else "role") from error
        return await self._request(WorkerId(worker), config, drain_s)

    def _check_present(self, worker: str) -> None:
        names = sorted(info.config.worker for info in self.places())
        if worker not in names:
            raise NoSuchWorker(f"there is no worker {worker[:80]!r}; there are {', '.join(names) or 'none'}")

    def _shapes_of(self, worker: str) -> WorkerShapes:
        self._check_present(worker)
        shapes = self.shapes().get(WorkerId(worker))
        if shapes is None:
            raise RequestError(f"{worker} has not said what it can become: its role changes by starting it again")
        return shapes

    async def _request(self, worker: WorkerId, config: WorkerConfig | None, drain_s: float) -> dict[str, Any]:
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        answer: asyncio.Future[WorkerStands] = loop.create_future()
        self._pending[number] = loop, answer
        self.post(ROUTER, ChangeRole(worker, number, config, drain_s))
        try:
            status = await asyncio.wait_for(answer, ANSWER_S)
        finally:
            self._pending.pop(number, None)
        if status.refused:
            raise RoleConflict(status.refused)
        becomes = {} if config is None else {"becomes": config.role.value}
        return {"worker": worker, "standing": status.standing, "role": status.role, **becomes}

    def stood(self, effect: WorkerStands) -> None:
        """Records the state of a change. The first status of a change is also the answer to its request."""
        loop, answer = self._pending.pop(effect.number, (None, None))
        if loop is not None and answer is not None and not loop.is_closed():
            loop.call_soon_threadsafe(_set_answer, answer, effect)
            if effect.refused:
                return
        if effect.standing == WorkerStatus.LEAVING or effect.worker not in self._changes:
            self._changes[effect.worker] = Change()
        change = self._changes[effect.worker]
        change.standing, change.why = effect.standing, effect.refused
        change.at[effect.standing] = time.time()


def _set_answer(answer: asyncio.Future[WorkerStands], effect: WorkerStands) -> None:
    if not answer.done():
        answer.set_result(effect)


NO_POOLS = Pools(lambda actor, event: None, list, dict, dict)  # for a stack whose executors cannot be rebuilt
