"""Breadth first over every state of a world, so that the first violation found has the shortest story."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from tests.explore.device import Violation
from tests.explore.invariants import check_end, check_state
from tests.explore.steps import follow
from tests.explore.world import Action, State, World


@dataclass
class Found:
    """What a search saw. `trace` leads from the start to `violation`."""

    states: int = 0
    transitions: int = 0
    ends: int = 0
    depth: int = 0
    seconds: float = 0.0
    complete: bool = False  # every reachable state was seen
    violation: str = ""
    trace: list[Action] = field(default_factory=list)
    outcomes: Counter[tuple[str, ...]] = field(default_factory=Counter)  # statuses of the clients at ends

    def line(self) -> str:
        rate = self.states / max(self.seconds, 1e-9)
        seen = "all of its" if self.complete else "the first"
        return (
            f"{seen} {self.states} states, {self.transitions} transitions, {self.ends} ends, depth {self.depth}, "
            f"{self.seconds:.1f} s, {rate:.0f} states/s"
        )


class Search:
    def __init__(self, world: World, limit: int = 10_000_000) -> None:
        self.world, self.limit = world, limit
        self.found = Found()
        self._known: dict[bytes, int] = {}
        self._level: dict[State, int] = {}  # states just found: most are come by in several orders, to the number
        self._parents, self._steps = array("q"), array("h")
        self._from, self._to = array("q"), array("q")  # natural steps, for `stuck`
        self._ends: list[int] = []

    def run(self) -> Found:
        began_s = time.perf_counter()
        level = [(0, self.world.start())]
        self._note(level[0][1], -1, 0)
        try:
            while level and len(self._parents) < self.limit:
                level = self._next(level)
                self.found.depth += 1
            self.found.complete = not level
            if self.found.complete:
                self._check_future()
        except Violation as violation:
            self.found.violation = str(violation)
        self.found.states, self.found.transitions = len(self._parents), self.found.transitions
        self.found.seconds = time.perf_counter() - began_s
        return self.found

    def _next(self, level: list[tuple[int, State]]) -> list[tuple[int, State]]:
        after = []
        self._level.clear()
        for number, state in level:
            for step, action in enumerate(self.world.actions(state)):
                fresh = self._step(number, state, step, action)
                if fresh is not None:
                    after.append(fresh)
        return after

    def _step(self, number: int, state: State, step: int, action: Action) -> tuple[int, State] | None:
        self.found.transitions += 1
        try:
            then = follow(self.world, state, action)
            place, fresh = self._level.get(then), False
            if place is None:
                key = self.world.key(then)
                place = self._known.get(key)
                fresh = place is None
                if place is None:
                    place = self._note(then, number, step, key)
                self._level[then] = place
        except Violation:
            self.found.trace = [*self.trace(number), action]
            raise
        if self.world.natural(action):
            self._from.append(number)
            self._to.append(place)
        return (place, then) if fresh else None

    def _note(self, state: State, parent: int, step: int, key: bytes | None = None) -> int:
        place = len(self._parents)
        self._known[key or self.world.key(state)] = place
        if check_state(self.world, state):
            check_end(self.world, state)
            self._ends.append(place)
            self.found.ends += 1
            self.found.outcomes[tuple(client.status for client in state.clients)] += 1
        self._parents.append(parent)
        self._steps.append(step)
        return place

    def trace(self, place: int) -> list[Action]:
        """The actions that lead from the start to a state: each state is taken again from its parent's."""
        steps: list[int] = []
        while self._parents[place] >= 0:
            steps.append(self._steps[place])
            place = self._parents[place]
        state, actions = self.world.start(), []
        for step in reversed(steps):
            action = next(islice(self.world.actions(state), step, None))
            actions.append(action)
            state = follow(self.world, state, action)
        return actions

    def _check_future(self) -> None:
        lost = stuck(np.array(self._from), np.array(self._to), self._ends, len(self._parents))
        if lost >= 0:
            self.found.trace = self.trace(lost)
            raise Violation("from here no end can be reached, whatever happens: the world goes round in circles")


def stuck(sources: np.ndarray, targets: np.ndarray, ends: list[int], count: int) -> int:
    """The first state, of `count`, from which no end can be reached over the edges; -1 where there is none."""
    order = np.argsort(targets, kind="stable")
    sources, firsts = sources[order], np.searchsorted(targets[order], np.arange(count + 1))
    reached = np.zeros(count, bool)
    reached[ends] = True
    border = list(ends)
    while border:
        place = border.pop()
        before = np.unique(sources[firsts[place] : firsts[place + 1]])
        before = before[~reached[before]]
        reached[before] = True
        border += before.tolist()
    return -1 if reached.all() else int(np.argmin(reached))


def explore(world: World, limit: int = 10_000_000) -> Found:
    return Search(world, limit).run()
