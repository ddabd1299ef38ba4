"""Which worker changes its role, and whether there are too few workers or too many: pure, by a literal table.

Load comes as workers kept busy: seconds of prefill that come in a second, and shares of a decode worker's memory
(`policy/scaling.py` predicts both). The pressure of a pool is its load over its workers times the share of them
that may be busy; the house is as well as its worst pool. A flip pays where it takes the worst pressure down by a
good part, and by more, in what is left of `horizon_s`, than the worker's absence costs for the `price_s` that a
flip takes. It must pay for `steady_s` without a break; then all flips of one batch are asked for; the next comes
`rest_s` after their end.

So under one load no flip is ever taken back (each lowers the worst pressure, and there are only so many ways to cut
a house), and under any load there are at most `at_once * (3600 / rest_s + 1)` flips an hour.

Splitwise's mixed pool is `Scaling(mixed=True, price_s=0, steady_s=0, rest_s=1, margin=0)`: a worker of the pool
that has room takes on both phases, at once, and goes back, or over, when the other needs it no more.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from jdisagg.core.errors import ConfigError, IllegalTransition
from jdisagg.core.events import (
    ROUTER,
    EmitTokens,
    Finish,
    Received,
    Reject,
    Send,
    Submit,
    WorkerJoined,
    WorkerLost,
    WorkerStands,
)
from jdisagg.core.messages import Joined, StartPrefill
from jdisagg.core.request import Request, RequestId, WorkerId
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.policy.worker.drain import WorkerStatus


@dataclass(frozen=True, slots=True)
class Scaling:
    """The thresholds of the scaler, in seconds and shares of one."""

    price_s: float = 10.0  # that a flip takes a worker away for: drained, cut anew, compiled, joined
    horizon_s: float = 300.0  # that a load is believed to last
    margin: float = 0.1  # share of the worst pressure that a flip must take away
    steady_s: float = 15.0  # that it must pay without a break
    rest_s: float = 60.0  # from the end of a batch of flips to the next
    late_s: float = 600.0  # a worker that has not joined again by then is given up
    at_once: int = 1  # flips of a batch
    prefill_busy: float = 0.7  # of prefill workers' time that may be taken: prompts come in bursts and wait
    decode_busy: float = 0.9  # of decode workers' memory, so
    idle: float = 0.5  # worst pressure under which nobody flips
    shrink_s: float = 600.0  # fewer workers are asked for only once fewer were enough for so long
    mixed: bool = False  # workers flip by way of both roles: Splitwise's mixed pool

    def check(self) -> None:
        """Raises ConfigError naming what cannot be."""
        for name in ("price_s", "horizon_s", "margin", "steady_s", "late_s", "idle", "shrink_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"autoscaling: {name} is {getattr(self, name)}, must be finite and not negative")
        for name in ("prefill_busy", "decode_busy"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"autoscaling: {name} is {getattr(self, name)}, must lie in (0, 1]")
        if not (self.rest_s > 0 and self.at_once >= 1):
            raise ConfigError(f"autoscaling: rest_s is {self.rest_s} and at_once {self.at_once}, must be over 0")

    @property
    def flips_an_hour(self) -> float:
        """There are never more, whatever the load."""
        return self.at_once * (3600 / self.rest_s + 1)


# ------------------------------------------------------------------ the table


class Stance(StrEnum):
    WATCHING = "watching"  # as it is, is well
    LEANING = "leaning"  # a flip would pay; it may be a burst
    FLIPPING = "flipping"  # workers are on their way from one role to another
    RESTING = "resting"  # what the last flips did is to show first


class Sign(StrEnum):
    PAYS = "pays"  # some flip would
    PAYS_NOT = "pays_not"
    LASTS = "lasts"  # it has paid for long enough
    ENDED = "ended"  # every flip asked for has ended, well or not
    RESTED = "rested"


TABLE: Mapping[tuple[Stance, Sign], Stance] = MappingProxyType(
    {
        (Stance.WATCHING, Sign.PAYS): Stance.LEANING,
        (Stance.LEANING, Sign.PAYS_NOT): Stance.WATCHING,
        (Stance.LEANING, Sign.LASTS): Stance.FLIPPING,
        (Stance.FLIPPING, Sign.ENDED): Stance.RESTING,
        (Stance.RESTING, Sign.RESTED): Stance.WATCHING,
    }
)


def next_stance(stance: Stance, sign: Sign) -> Stance:
    """The stance that follows, or IllegalTransition."""
    try:
        return TABLE[stance, sign]
    except KeyError:
        raise IllegalTransition(f"an autoscaler that is {stance} cannot take {sign}") from None


# ------------------------------------------------------------------ what is weighed

# The shares of a worker that the prefill and the decode phase get.
SHARES = MappingProxyType({Role.PREFILL: (1.0, 0.0), Role.DECODE: (0.0, 1.0), Role.COLOCATED: (0.5, 0.5)})
STRAIGHT: Mapping[Role, tuple[Role, ...]] = MappingProxyType(
    {
        Role.PREFILL: (Role.DECODE,),
        Role.DECODE: (Role.PREFILL,),
        Role.COLOCATED: (Role.PREFILL, Role.DECODE),
    }
)
MIXED = MappingProxyType(STRAIGHT | {Role.PREFILL: (Role.COLOCATED,), Role.DECODE: (Role.COLOCATED,)})


@dataclass(frozen=True, slots=True)
class Load:
    """Workers that each phase is predicted to keep busy."""

    prefill: float
    decode: float


@dataclass(frozen=True, slots=True)
class Standby:
    """One worker that serves. `work`: what it would have to end first, in any one unit; `can_be`: other roles."""

    role: Role
    work: float = 0.0
    can_be: frozenset[Role] = frozenset(Role)


@dataclass(frozen=True, slots=True)
class Flip:
    worker: WorkerId
    role: Role
    why: str = ""


@dataclass(frozen=True, slots=True)
class Replicas:
    """Workers that the load asks for."""

    prefill: int
    decode: int

    @property
    def total(self) -> int:
        return self.prefill + self.decode


Workers = Mapping[WorkerId, Standby]


def pressure(load: Load, roles: list[Role], scaling: Scaling) -> float:
    """Returns the load of the busier pool: 1 at its target; infinite if a phase has no worker."""
    prefills, decodes = (sum(SHARES[role][phase] for role in roles) for phase in (0, 1))
    if not (prefills and decodes):
        return math.inf
    return max(load.prefill / (prefills * scaling.prefill_busy), load.decode / (decodes * scaling.decode_busy))


def best_flip(load: Load, workers: Workers, scaling: Scaling) -> Flip | None:
    """The one that pays most; None where none does. Of equal workers the one with the least work."""
    roles, steps = [each.role for each in workers.values()], MIXED if scaling.mixed else STRAIGHT
    now = pressure(load, roles, scaling)
    if now <= scaling.idle or math.isinf(now):
        return None
    options = list[tuple[float, float, WorkerId, Role]]()
    for change in [(before, after) for before in sorted(set(roles)) for after in steps[before]]:
        then = _after(load, roles, change, now, scaling)
        if then < math.inf:
            options += [(then, work, name, change[1]) for work, name in _least_busy(workers, change)]
    if not options:
        return None
    then, _, name, role = min(options)
    return Flip(name, role, f"the worst pool's pressure falls from {now:.2f} to {then:.2f}")


def _least_busy(workers: Workers, change: tuple[Role, Role]) -> list[tuple[float, WorkerId]]:
    """The one that ends first of those that can change so, if any."""
    able = [(each.work, name) for name, each in workers.items() if each.role is change[0] and change[1] in each.can_be]
    return [min(able)] if able else []


def _after(load: Load, roles: list[Role], change: tuple[Role, Role], now: float, scaling: Scaling) -> float:
    """The worst pressure after one worker's change from the one role to the other; infinite where it does not pay."""
    others = list(roles)
    others.remove(change[0])
    gone, after = pressure(load, others, scaling), pressure(load, [*others, change[1]], scaling)
    if math.isinf(gone) or after >= now or after > now * (1 - scaling.margin):
        return math.inf
    left_s = scaling.horizon_s - scaling.price_s
    pays = (now - after) * left_s > (gone - now) * scaling.price_s and left_s > 0
    return after if pays else math.inf


def best_batch(load: Load, workers: Workers, scaling: Scaling) -> list[Flip]:
    """One after the other, each where the others are done; while all are away, both phases are served."""
    found, left = list[Flip](), dict(workers)
    while len(found) < scaling.at_once:
        flip = best_flip(load, left, scaling)
        if flip is None:
            break
        found.append(flip)
        left[flip.worker] = Standby(flip.role, can_be=frozenset())
        away = {each.worker for each in found}
        if math.isinf(pressure(load, [each.role for name, each in workers.items() if name not in away], scaling)):
            return found[:-1]
    return found


# ------------------------------------------------------------------ the autoscaler


@dataclass(slots=True)
class Autoscaler:
    """`look` is asked every few seconds; `ended` is told of each flip that it has asked for."""

    scaling: Scaling
    stance: Stance = Stance.WATCHING
    flips: int = 0  # asked for, ever
    _since_s: float = 0.0  # when it took this stance
    _under_way: set[WorkerId] = field(default_factory=set[WorkerId])
    _unable: set[tuple[WorkerId, Role]] = field(default_factory=set[tuple[WorkerId, Role]])
    _asked: dict[WorkerId, Role] = field(default_factory=dict[WorkerId, Role])
    _wanted: deque[tuple[float, Replicas]] = field(default_factory=deque[tuple[float, Replicas]])

    def look(self, load: Load, workers: Workers, now_s: float) -> list[Flip]:
        """Flips to be asked for now. `workers` are those that serve; `now_s` never falls."""
        self._want(load, now_s)
        if self.stance is Stance.FLIPPING and (not self._under_way or now_s - self._since_s >= self.scaling.late_s):
            self._under_way.clear()
            self._take(Sign.ENDED, now_s)
        if self.stance is Stance.RESTING and now_s - self._since_s >= self.scaling.rest_s:
            self._take(Sign.RESTED, now_s)
        if self.stance not in (Stance.WATCHING, Stance.LEANING):
            return []
        batch = best_batch(load, self._able(workers), self.scaling)
        if bool(batch) is not (self.stance is Stance.LEANING):
            self._take(Sign.PAYS if batch else Sign.PAYS_NOT, now_s)
        if not batch or now_s - self._since_s < self.scaling.steady_s:
            return []
        self._take(Sign.LASTS, now_s)
        self._asked = {flip.worker: flip.role for flip in batch}
        self._under_way = set(self._asked)
        self.flips += len(batch)
        return batch

    def ended(self, worker: WorkerId, *, well: bool) -> None:
        """The worker serves again, or was lost; not `well`: it could not become what it was to be, and is not asked
        for that again."""
        if worker in self._under_way and not well:
            self._unable.add((worker, self._asked[worker]))
        self._under_way.discard(worker)

    def desired(self) -> Replicas | None:
        """Workers of each role that there should be; None before the first look. It rises at once, and falls to the
        most that was asked for within `shrink_s`."""
        if not self._wanted:
            return None
        found = [wanted for _, wanted in self._wanted]
        return Replicas(max(each.prefill for each in found), max(each.decode for each in found))

    def _want(self, load: Load, now_s: float) -> None:
        """Adds a value; only values that no later one exceeds are kept, so that there are few."""
        scaling = self.scaling
        counts = (load.prefill / scaling.prefill_busy, load.decode / scaling.decode_busy)
        wanted = Replicas(*(max(1, math.ceil(min(each, 1e9) - 1e-9)) for each in counts))
        kept = self._wanted
        while kept and kept[0][0] < now_s - scaling.shrink_s:
            kept.popleft()
        while kept and kept[-1][1].prefill <= wanted.prefill and kept[-1][1].decode <= wanted.decode:
            kept.pop()
        kept.append((now_s, wanted))

    def _able(self, workers: Workers) -> Workers:
        def rest(name: WorkerId, each: Standby) -> Standby:
            able = frozenset(role for role in each.can_be if (name, role) not in self._unable)
            return Standby(each.role, each.work, able)

        return {name: rest(name, each) for name, each in workers.items()} if self._unable else workers

    def _take(self, sign: Sign, now_s: float) -> None:
        self.stance, self._since_s = next_stance(self.stance, sign), now_s


# What the coming minutes ask of each phase, in workers kept busy, from what the router heard and said of late.
#
# Prompts are predicted from a level and a trend of what arrived; a prompt token costs the seconds that prefill
# workers were busy, over the tokens they began to answer (so KV that is found makes them cheaper, and packing
# too). A request costs a decode worker the share of its pages or slots that it holds, times the seconds that
# those of late held it. What waits already is to be worked off within `DRAIN_S`. Nothing is predicted before both
# costs were measured once.

BUCKET_S = 10.0  # of arrivals
LEVEL, SLOPE = 0.2, 0.05  # of what is known, that each bucket renews
DAMPED = 0.9  # of a trend, that is left of it with each bucket ahead
DRAIN_S = 60.0  # in which what waits is to be worked off
KEEP = 0.98  # of what was measured, with each request


@dataclass(slots=True)
class Trend:
    """A rate, smoothed twice (Holt), its slope dying away ahead (Gardner). `add` and `ahead` take times that rise."""

    level: float = 0.0  # a second
    slope: float = 0.0  # a second, by bucket
    _sum: float = 0.0
    _ends_s: float | None = None  # of the present bucket
    _buckets: int = 0

    def add(self, amount: float, now_s: float) -> None:
        self._pass(now_s)
        self._sum += amount

    def ahead(self, now_s: float, seconds: float) -> float:
        """A second, so far ahead. Before a bucket is full: what came in it."""
        self._pass(now_s)
        if not self._buckets:
            return self._sum / BUCKET_S
        steps = round(seconds / BUCKET_S)
        return max(0.0, self.level + self.slope * DAMPED * (1 - DAMPED**steps) / (1 - DAMPED))

    def _pass(self, now_s: float) -> None:
        """Buckets that have ended are taken in; after a long silence, as many as matter."""
        if self._ends_s is None:
            self._ends_s = now_s + BUCKET_S
        self._ends_s = max(self._ends_s, now_s - 100 * BUCKET_S)
        while now_s >= self._ends_s:
            rate, self._sum = self._sum / BUCKET_S, 0.0
            self._ends_s += BUCKET_S
            self._take(rate)

    def _take(self, rate: float) -> None:
        self._buckets += 1
        if self._buckets == 1:
            self.level = rate
            return
        weight = max(LEVEL, 1 / self._buckets)
        before, expected = self.level, self.level + DAMPED * self.slope
        self.level = weight * rate + (1 - weight) * expected
        self.slope = SLOPE * (self.level - before) + (1 - SLOPE) * DAMPED * self.slope


@dataclass(slots=True)
class Mean:
    """A decayed weighted mean, in which the latest value counts most."""

    amount: float = 0.0
    weight: float = 0.0

    def add(self, amount: float, weight: float) -> None:
        self.amount, self.weight = KEEP * self.amount + amount, KEEP * self.weight + weight

    @property
    def value(self) -> float | None:
        return self.amount / self.weight if self.weight else None


@dataclass(slots=True)
class Asked:
    """A request that has not ended."""

    request: Request
    prefill: WorkerId | None = None  # None: it waits for a reservation
    first_s: float | None = None  # when its first token came
    decode: WorkerId | None = None  # that drew the latest of its tokens
    told: int = 0


@dataclass(slots=True)
class Busy:
    """One worker's prompts, and since when it has had some."""

    prompts: set[RequestId] = field(default_factory=set[RequestId])
    since_s: float = 0.0


class Demand:
    """An observer of the router's driver (`observe`); `load` is what it predicts, `work` what each worker has now."""

    def __init__(self, workers: Iterable[WorkerConfig] = ()) -> None:
        self.configs = {each.worker: each for each in workers}
        self._rows: dict[RequestId, Asked] = {}
        self._busy: dict[WorkerId, Busy] = {}
        self._prompts, self._requests = Trend(), Trend()  # tokens, and requests
        self.prompt_s, self.decode_s = Mean(), Mean()  # busy seconds a prompt token; worker-seconds a request

    # ------------------------------------------------------------ what is observed

    def observe(self, actor: WorkerId, item: Any, now_s: float) -> None:
        """Every event and effect of the driver; those of the router count."""
        if actor != ROUTER:
            return
        if isinstance(item, Send):
            if isinstance(item.message, StartPrefill):
                self._prefills(item.to, item.message.attempt.request_id, now_s)
            return
        match item:
            case EmitTokens():
                self._emitted(item, now_s)
            case Submit(request):
                self._submitted(request, now_s)
            case Finish() | Reject():
                self._ended(item, now_s)
            case WorkerJoined(config) | Received(_, Joined(config=config)):
                self.configs[config.worker] = config
                self._busy.pop(config.worker, None)
            case WorkerLost(worker):
                self.configs.pop(worker, None)
                self._busy.pop(worker, None)
            case _:
                pass

    def _submitted(self, request: Request, now_s: float) -> None:
        self._rows[request.request_id] = Asked(request)
        self._prompts.add(len(request.prompt), now_s)
        self._requests.add(1, now_s)

    def _prefills(self, worker: WorkerId, request_id: RequestId, now_s: float) -> None:
        row = self._rows.get(request_id)
        if row is None or row.first_s is not None:
            return
        self._leave(row, now_s)
        row.prefill = worker
        busy = self._busy.setdefault(worker, Busy())
        if not busy.prompts:
            busy.since_s = now_s
        busy.prompts.add(request_id)

    def _emitted(self, effect: EmitTokens, now_s: float) -> None:
        row = self._rows.get(effect.request_id)
        if row is None:
            return
        row.told += len(effect.delta.sampled)
        row.decode = effect.worker
        if row.first_s is None:
            row.first_s = now_s
            self._leave(row, now_s, answered=True)

    def _leave(self, row: Asked, now_s: float, answered: bool = False) -> None:
        """Removes a prompt from its worker; the time since the last removal is shared by all its prompts."""
        busy = None if row.prefill is None else self._busy.get(row.prefill)
        if busy is None or row.request.request_id not in busy.prompts:
            return
        busy.prompts.discard(row.request.request_id)
        self.prompt_s.add(max(0.0, now_s - busy.since_s), len(row.request.prompt) if answered else 0)
        busy.since_s = now_s

    def _ended(self, effect: Finish | Reject, now_s: float) -> None:
        row = self._rows.pop(effect.request_id, None)
        if row is None:
            return
        self._leave(row, now_s)
        config = self.configs.get(row.decode) if isinstance(effect, Finish) and row.decode else None
        if config is not None and config.role.decodes and row.first_s is not None:
            self.decode_s.add(_share(row, config) * (now_s - row.first_s), 1)

    # ------------------------------------------------------------ what is predicted

    def load(self, now_s: float, ahead_s: float) -> Load | None:
        """Returns the load that far ahead; None before the first measurement."""
        prompt_s, decode_s = self.prompt_s.value, self.decode_s.value
        if prompt_s is None or decode_s is None:
            return None
        unanswered = [row for row in self._rows.values() if row.first_s is None]
        waiting = sum(row.prefill is None for row in unanswered)
        tokens = self._prompts.ahead(now_s, ahead_s) + sum(len(row.request.prompt) for row in unanswered) / DRAIN_S
        requests = self._requests.ahead(now_s, ahead_s) + waiting / DRAIN_S
        return Load(tokens * prompt_s, max(requests * decode_s, self._held()))

    def work(self) -> Counter[WorkerId]:
        """Requests by the worker that has them."""
        holders = (row.prefill if row.first_s is None else row.decode for row in self._rows.values())
        return Counter(each for each in holders if each is not None)

    def _held(self) -> float:
        """Decode workers' worth of what runs now."""
        decoders = [each for each in self.configs.values() if each.role.decodes]
        if not decoders:
            return 0.0
        return sum(_share(row, decoders[0]) for row in self._rows.values() if row.first_s is not None)


def _share(row: Asked, config: WorkerConfig) -> float:
    """Returns the share of a decode worker that this request holds: of its pages or its slots, the larger one."""
    pages = config.pages_for(len(row.request.prompt) + row.told)
    return max(pages / config.num_pages, 1 / config.num_slots)


# The autoscaler with what it looks at: an observer of the router's driver that says, when asked, who is to flip.
#
# Live serving and the simulator give it every event and effect, ask it every `LOOK_S`, and bring its flips to the
# router as an operator's changes of role. It knows who serves by what the router says of it.

LOOK_S = 5.0
ALL_ROLES = frozenset(Role)

RolesOf = Callable[[WorkerId], frozenset[Role]]


class RoleScaler:
    """`can_be` says which roles a worker can take; it is asked at each look."""

    def __init__(
        self, scaling: Scaling, workers: Iterable[WorkerConfig], can_be: RolesOf = lambda worker: ALL_ROLES
    ) -> None:
        scaling.check()
        self.scaling, self.autoscaler, self.demand = scaling, Autoscaler(scaling), Demand(workers)
        self.load: Load | None = None  # of the last look
        self._away: dict[WorkerId, float] = {}  # since when
        self._can_be = can_be

    @property
    def configs(self) -> Mapping[WorkerId, WorkerConfig]:
        """The workers that there are, as they are."""
        return self.demand.configs

    def observe(self, actor: WorkerId, item: Any, now_s: float) -> None:
        """Takes an event or an effect of the driver."""
        if actor != ROUTER:
            return
        self.demand.observe(actor, item, now_s)
        match item:
            case WorkerStands():
                self._stands(item, now_s)
            case WorkerJoined(config):
                self._away.pop(config.worker, None)
            case WorkerLost(worker):
                self._away.pop(worker, None)
                self.autoscaler.ended(worker, well=True)
            case _:
                pass

    def _stands(self, told: WorkerStands, now_s: float) -> None:
        """Each change that ends well tells what one costs: from being asked for to serving again."""
        if told.standing and told.standing != WorkerStatus.SERVING:
            self._away.setdefault(told.worker, now_s)
            return
        left_s = self._away.pop(told.worker, None)
        self.autoscaler.ended(told.worker, well=not told.refused)
        if left_s is not None and not told.refused:
            self._learn_price(now_s - left_s)

    def _learn_price(self, seconds: float) -> None:
        """Half of what is known is the latest."""
        self.scaling = replace(self.scaling, price_s=(self.scaling.price_s + seconds) / 2)
        self.autoscaler.scaling = self.scaling

    def look(self, now_s: float) -> list[Flip]:
        """Flips to be asked for now; none before anything is known."""
        self.load = self.demand.load(now_s, self.scaling.price_s + self.scaling.steady_s)
        if self.load is None:
            return []
        work = self.demand.work()
        workers = {
            name: Standby(config.role, work[name], self._can_be(name))
            for name, config in self.configs.items()
            if name not in self._away
        }
        return self.autoscaler.look(self.load, workers, now_s)
