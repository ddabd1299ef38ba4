"""What two states have in common: any value as a form, with the epochs, plan ids and times cut out of it.

Epochs and plan ids are only ever compared with each other, and deadlines with the present, so states whose forms are
equal, whose epochs stand in one order and whose deadlines are equally far away have one future. The walk takes every
attribute of every object, private ones too: what it leaves out is listed here, and why.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, NamedTuple

from jdisagg.core.ledger import Ledger
from jdisagg.core.request import Attempt, Request, Sampled, SamplingParams
from jdisagg.core.router_config import RouterConfig
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.effect_buffer import EffectBuffer
from jdisagg.policy.request_size import OrderKey
from jdisagg.policy.router.router import Router

CONSTANTS = (bool, bytes, Request, SamplingParams, Sampled, OrderKey, RouterConfig, WorkerConfig, Enum)
LEFT_OUT = frozenset(
    {
        "detail",  # words for people
        "ledger",  # instants for people
        "at_s",  # of a Mark: goes into a ledger
        "wire_s",  # for a ledger
        "wire",  # so
        "_finish_gap_s",  # how long a rejected client is told to wait
        "_last_finish_s",
        "_counts",  # a sum of what `_owners` says
        "new_step_id",  # a view of the counter
        "_steady",  # rows as they would be formed anyway
        "is_repeating",  # so
        "_has_formed",  # so
        "is_quiet",  # of the step that ended in this very event
        "seatings",  # changes of who sits where: only compared with what `_steady` knows
        "_snapshot",  # so
        "turn_times",  # never told of a step here, so that all turns are within the gap
        "note",  # where decisions are told, for people
        "wait_told",  # whether they were
    }
)
TIMES = frozenset({"deadline_s", "recall_s", "queue_deadline_s", "armed_s", "until_s"})
PAST_TIMES = frozenset({"moved_s", "_now_s", "began_s", "_last_done_s"})  # deadlines are reckoned from them later
LONG_S = 1000.0  # over any wait: what is past is kept apart by how long ago it was
SATURATING = {"steps_since_chunk": 1}  # only ever compared with at most this


class Shape(NamedTuple):
    form: Any  # hashable; epochs, plan ids, times and counters are holes in it
    epochs: tuple[int, ...]
    plans: tuple[int, ...]
    times: tuple[float, ...]
    counters: tuple[int, ...]  # the next fresh ids: what they are makes no difference


_NAMES: dict[type, tuple[str, ...]] = {}


def names_of(value: Any) -> tuple[str, ...]:
    """The attributes that count."""
    names = _NAMES.get(type(value))
    if names is None:
        every = [each.name for each in fields(value)] if is_dataclass(value) else list(vars(value))
        names = _NAMES[type(value)] = tuple(name for name in every if name not in LEFT_OUT)
    return names


def shape_of(value: Any) -> Shape:
    return _Walk().shape(value)


class _Walk:
    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.plans: list[int] = []
        self.times: list[float] = []
        self.counters: list[int] = []
        self._seen: dict[int, int] = {}  # objects that change, by id: their number, so that sharing is seen
        self._least_served = 0

    def shape(self, value: Any) -> Shape:
        form = self.walk(value, "")
        return Shape(form, tuple(self.epochs), tuple(self.plans), tuple(self.times), tuple(self.counters))

    def walk(self, value: Any, name: str) -> Any:
        if value is None or isinstance(value, CONSTANTS):
            return value
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, int | float):
            return self._number(value, name)
        if isinstance(value, Attempt):
            self.epochs.append(value.epoch)
            return ("attempt", value.request_id)
        if isinstance(value, tuple | list | deque | set | frozenset):
            each = sorted(value) if isinstance(value, set | frozenset) else value
            return (type(value).__name__, *[self.walk(one, name) for one in each])
        if isinstance(value, dict):
            return self._dict(value, name)
        return self._object(value)

    def _text(self, value: str) -> Any:
        """Keys of timers name epochs: source/3/r1."""
        if "/" not in value:
            return value
        pieces = value.split("/")
        self.epochs += [int(piece) for piece in pieces if piece.isdigit()]
        return tuple("#" if piece.isdigit() else piece for piece in pieces)

    def _number(self, value: float, name: str) -> Any:
        if name == "epoch":
            self.epochs.append(int(value))
            return "#"
        if name == "step_id":
            self.plans.append(int(value))
            return "#"
        if name in TIMES:
            self.times.append(value)
            return "@"
        if name in PAST_TIMES:
            self.times.append(value + LONG_S)
            return "@"
        if name == "served":
            return value - self._least_served
        return min(value, SATURATING[name]) if name in SATURATING else value

    def _dict(self, value: dict[Any, Any], name: str) -> Any:
        of_plans = name == "steps"
        ordered = isinstance(value, OrderedDict)  # least recently used first: the order counts
        keys = sorted(value) if value and not ordered and all(isinstance(key, int) for key in value) else value
        return ("dict", *[(self.walk(key, "step_id" if of_plans else ""), self.walk(value[key], name)) for key in keys])

    def _object(self, value: Any) -> Any:
        if isinstance(value, itertools.count):
            self.counters.append(int(repr(value)[6:-1]))  # count(7)
            return "count"
        if isinstance(value, Ledger | EffectBuffer):
            return type(value).__name__
        if id(value) in self._seen:
            return ("again", self._seen[id(value)])
        self._seen[id(value)] = len(self._seen)
        if isinstance(value, Router):
            self._least_served = min((peer.served for peer in value.peers.values()), default=0)
        return (type(value).__name__, *[self.walk(getattr(value, name), name) for name in names_of(value)])
