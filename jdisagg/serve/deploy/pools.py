"""The workers as their operator sees them: what each is and can be, where it stands, and how it is made another."""

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

# Workers as people see them: where each stands and how its mesh is cut, of this process and of others.


@dataclass(frozen=True, slots=True)
class Place:
    """One worker that is there now. `stages`: those of its mesh, one behind the other; layer groups are none."""

    config: WorkerConfig
    stages: tuple[StageShape, ...] = ()
    remote: bool = False  # in another process
    leaving: bool = False  # it ends what it has, and is given nothing more

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
    """A worker whose pages lie in these groups of layers: each a stage, or all on one mesh. A draft's are none."""
    stages = tuple(each for each in groups if not each.draft)
    if config.pipeline_stages == config.decode.n == 1 and len(stages) > 1:
        layers = range(stages[0].layers.start, stages[-1].layers.stop)
        stages = (StageShape(layers, stages[0].tp, stages[0].page_size, stages[0].dtype),)
    return Place(config, stages, remote, leaving)


ANSWER_S = 10.0  # for the router to take a change, or to refuse it


class NoSuchWorker(RequestError):
    """There is no worker of this name (HTTP 404)."""


class RoleConflict(JdisaggError):
    """The worker cannot leave now: it is the last of its phase, or on its way already (HTTP 409)."""


@dataclass(slots=True)
class Change:
    """The last change of one worker: when it reached each standing, seconds of the wall clock, and what went wrong."""

    standing: str = WorkerStatus.SERVING.value
    at: dict[str, float] = field(default_factory=dict[str, float])
    why: str = ""


@dataclass
class Pools:
    """`post` brings an event to the router's driver; `places` and `shapes` are of all workers that are there now.

    Routes call it on the event loop; `stood` is called on the driver's thread.
    """

    post: Callable[[WorkerId, ChangeRole], None]
    places: Callable[[], list[Place]]
    shapes: Callable[[], Mapping[WorkerId, WorkerShapes]]
    times: Callable[[], Mapping[WorkerId, ReshapeTimes]]
    scaling: Autoscaling | None = None  # what asks for changes by itself
    _changes: dict[WorkerId, Change] = field(default_factory=dict[WorkerId, Change])
    _numbers: count[int] = field(default_factory=lambda: count(1))
    _asked: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Future[WorkerStands]]] = field(default_factory=dict)

    # ------------------------------------------------------------ what there is

    def described(self) -> list[dict[str, Any]]:
        """Every worker, as GET /admin/workers shows it."""
        shapes, times = self.shapes(), self.times()
        return [self._described(place, shapes.get(place.config.worker), times) for place in self.places()]

    def _described(
        self, place: Place, shapes: WorkerShapes | None, times: Mapping[WorkerId, ReshapeTimes]
    ) -> dict[str, Any]:
        worker = place.config.worker
        change = self._changes.get(worker, Change("leaving" if place.leaving else WorkerStatus.SERVING.value))
        took = times.get(worker)
        return place.to_json() | {
            "standing": change.standing,
            "can_be": [] if shapes is None else [*shapes.able],
            "changed_at": dict(change.at),
            "why": change.why,
            "took": None if took is None else asdict(took),
        }

    # ------------------------------------------------------------ what is asked

    async def drain(self, worker: str, drain_s: float) -> dict[str, Any]:
        """It takes nothing new, and what it has goes elsewhere after `drain_s`. Raises as `change`."""
        self._check_there(worker)
        return await self._ask(WorkerId(worker), None, drain_s)

    async def change(self, worker: str, role: str, mesh: str, drain_s: float) -> dict[str, Any]:
        """It becomes this, on its devices. Raises NoSuchWorker, RequestError, RoleConflict."""
        try:
            config = self._shapes_of(worker).find(role, mesh).config
        except ConfigError as error:
            raise RequestError(str(error), param="mesh" if mesh else "role") from error
        return await self._ask(WorkerId(worker), config, drain_s)

    def _check_there(self, worker: str) -> None:
        names = sorted(place.config.worker for place in self.places())
        if worker not in names:
            raise NoSuchWorker(f"there is no worker {worker[:80]!r}; there are {', '.join(names) or 'none'}")

    def _shapes_of(self, worker: str) -> WorkerShapes:
        self._check_there(worker)
        shapes = self.shapes().get(WorkerId(worker))
        if shapes is None:
            raise RequestError(f"{worker} has not said what it can become: its role changes by starting it again")
        return shapes

    async def _ask(self, worker: WorkerId, config: WorkerConfig | None, drain_s: float) -> dict[str, Any]:
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        answer: asyncio.Future[WorkerStands] = loop.create_future()
        self._asked[number] = loop, answer
        self.post(ROUTER, ChangeRole(worker, number, config, drain_s))
        try:
            stands = await asyncio.wait_for(answer, ANSWER_S)
        finally:
            self._asked.pop(number, None)
        if stands.refused:
            raise RoleConflict(stands.refused)
        becomes = {} if config is None else {"becomes": config.role.value}
        return {"worker": worker, "standing": stands.standing, "role": stands.role, **becomes}

    def stood(self, effect: WorkerStands) -> None:
        """The router says where a change is. The first word of each is the answer to who asked for it."""
        loop, answer = self._asked.pop(effect.number, (None, None))
        if loop is not None and answer is not None and not loop.is_closed():
            loop.call_soon_threadsafe(_answered, answer, effect)
            if effect.refused:
                return
        if effect.standing == WorkerStatus.LEAVING or effect.worker not in self._changes:
            self._changes[effect.worker] = Change()
        change = self._changes[effect.worker]
        change.standing, change.why = effect.standing, effect.refused
        change.at[effect.standing] = time.time()


def _answered(answer: asyncio.Future[WorkerStands], effect: WorkerStands) -> None:
    if not answer.done():
        answer.set_result(effect)


NO_POOLS = Pools(lambda actor, event: None, list, dict, dict)  # of a stack whose machines cannot be made anew
