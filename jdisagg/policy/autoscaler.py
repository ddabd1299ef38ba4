"""Which worker changes its role, and whether there are too few workers or too many: pure, by a literal table.

Load comes as workers kept busy: seconds of prefill that come in a second, and shares of a decode worker's memory
(`policy/demand.py` predicts both). The pressure of a pool is its load over its workers times the share of them that may
be busy; the house is as well as its worst pool. A flip pays where it takes the worst pressure down by a good part, and
by more, in what is left of `horizon_s`, than the worker's absence costs for the `price_s` that a flip takes. It must
pay for `steady_s` without a break; then all flips of one batch are asked for; the next comes `rest_s` after their end.

So under one load no flip is ever taken back (each lowers the worst pressure, and there are only so many ways to cut a
house), and under any load there are at most `at_once * (3600 / rest_s + 1)` flips an hour.

Splitwise's mixed pool is `Scaling(mixed=True, price_s=0, steady_s=0, rest_s=1, margin=0)`: a worker of the pool that
has room takes on both phases, at once, and goes back, or over, when the other needs it no more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from jdisagg.core.errors import ConfigError, IllegalTransition
from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import Role


@dataclass(frozen=True, slots=True)
class Scaling:
    """What it decides by; seconds, and shares of one."""

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
    """Of the worse pool: 1 where as much of it is taken as may be; infinite where a phase has nobody."""
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
        """Those that no later one exceeds are kept, so that there are few."""
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
