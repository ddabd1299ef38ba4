"""Steps that are certain to repeat, run ahead of the clock: when each ends, so that one event can stand for many.

A worker says how many of its steps end quietly; here follows when, exactly as step by step. Whatever comes in between
takes the steps that have ended by then, and the rest of what was foreseen stands where the worker still says so.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence, Sized
from collections.abc import Sequence as Ids
from functools import cache
from itertools import count
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from jdisagg.core.events import RunStep, Send
from jdisagg.core.messages import Progress, StartPrefill
from jdisagg.core.request import WorkerId
from jdisagg.core.steps import DecodeRows, StepPlan
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.policy.cache.prefix_cache import NamedTokens, PageHash
from jdisagg.policy.worker.worker import Worker
from jdisagg.sim.cost_models import CostModel, ManySteps
from jdisagg.sim.device import TOKEN, Device, Flying, Span
from jdisagg.sim.outcome import Lookups

WORTH = 4  # quiet steps from which on foreseeing them takes less than taking them


class FastForward:
    """The next `steps` quiet ends of one device, of plans that go round."""

    def __init__(self, device: Device, cost: CostModel, round_of: Sequence[DecodeRows], steps: int) -> None:
        self.device, self.round_of, self.steps = device, round_of, steps
        self.taken = 0
        self._ahead = len(device.flight)
        self._seconds = [
            _seconds(device, cost, plan, len(range(place, steps, len(round_of)))) for place, plan in enumerate(round_of)
        ]
        self.done_s = [each.done_s for each in device.flight]  # of the steps in flight, and then of one for each end
        self.done_s += self._one_stage() if len(device.pipeline.free_s) == 1 else self._stages()

    def stands(self, repeatable_steps: int) -> bool:
        """Whether what is left is what the worker says now: no step was dispatched that was not foreseen."""
        return self.steps - self.taken == repeatable_steps and len(self.device.flight) == self._ahead

    @property
    def next_s(self) -> float:
        """When the first step ends that is not foreseen to be quiet."""
        return self.done_s[self.steps]

    def ended(self, at_s: float) -> int:
        """Quiet steps not taken yet that have ended at `at_s`."""
        return bisect_right(self.done_s, at_s, self.taken, self.steps) - self.taken

    def _one_stage(self) -> list[float]:
        """Back to back: each step begins when the one before it is through."""
        (seconds,) = self._seconds
        return np.cumsum(np.concatenate((self.done_s[-1:], seconds)))[1:].tolist()

    def _stages(self) -> list[float]:
        pipeline, done_s = self.device.pipeline.copy(), self.done_s.copy()
        for step in range(self.steps):
            done_s.append(pipeline.run_step(done_s[step], *self._step(step)).done_s)
        return done_s[self._ahead :]

    def _step(self, step: int) -> tuple[int, float]:
        """Microbatch and seconds of the step that follows this end."""
        times, place = divmod(step, len(self.round_of))
        return self.round_of[place].microbatch, float(self._seconds[place][times])

    def take(self, steps: int, flying: Sequence[StepPlan]) -> list[tuple[DecodeRows, Span]]:
        """The device as it is after `steps` more ends; `flying`: the steps dispatched last. Returns what ran, and when.

        Back to back steps of one stage are one span.
        """
        device, first = self.device, self.taken
        self.taken = stop = first + steps
        for place, plan in enumerate(self.round_of):
            size = len(self.round_of)
            device.fed(plan.active, len(range(place, stop, size)) - len(range(place, first, size)))
        kept = [plan for plan, _ in device.flight][steps:]
        device.flight.clear()
        device.flight.extend(map(Flying, [*kept, *flying], self.done_s[stop : stop + self._ahead]))
        if len(device.pipeline.free_s) == 1:
            return [(self.round_of[0], self._pass(first, stop))]
        return [
            (
                self.round_of[step % len(self.round_of)],
                device.pipeline.run_step(self.done_s[step], *self._step(step)),
            )
            for step in range(first, stop)
        ]

    def _pass(self, first: int, stop: int) -> Span:
        pipeline = self.device.pipeline
        span = Span(self.done_s[first + self._ahead - 1], self.done_s[stop + self._ahead - 1])
        pipeline.free_s[0] = pipeline.step_done_s[0] = span.done_s
        pipeline.busy_s += span.done_s - span.start_s
        return span


class StepEnds:
    """When each worker's next step ends that an event has to stand for; quiet ones before it are taken together."""

    def __init__(self, fast_forward: bool) -> None:
        self.fast_forward = fast_forward
        self.skipped = 0  # steps that no event stood for
        self.foreseen: dict[WorkerId, FastForward] = {}
        self._due_s: dict[WorkerId, float] = {}

    def look_ahead(self, name: WorkerId, worker: Worker, device: Device, cost: CostModel) -> float | None:
        """When the next step ends that does not end quietly; None where that is known already."""
        seen = self.foreseen.get(name)
        quiet = worker.repeatable_steps if self.fast_forward else 0
        if seen is not None and seen.stands(quiet):
            return None
        due_s = device.flight[0].done_s
        if quiet < WORTH:
            self.foreseen.pop(name, None)
        else:
            seen = self.foreseen[name] = FastForward(device, cost, worker.scheduler.next_round(), quiet)
            due_s = seen.next_s
        if self._due_s.get(name) == due_s:
            return None
        self._due_s[name] = due_s
        return due_s

    def is_due(self, name: WorkerId, now_s: float) -> bool:
        """Whether it is that step that ends now; then it is due no more."""
        due = self._due_s.get(name) == now_s
        if due:
            del self._due_s[name]
        return due

    def forget(self, name: WorkerId) -> None:
        """It is gone, and its steps with it."""
        self.foreseen.pop(name, None)
        self._due_s.pop(name, None)

    def catch_up(self, name: WorkerId, worker: Worker, at_s: float) -> CaughtUp | None:
        """The worker's quiet steps that have ended by `at_s` end in its books; None where there are none."""
        seen = self.foreseen[name]
        steps = seen.ended(at_s)
        if not steps:
            return None
        effects = worker.end_repeated_steps(steps, TOKEN)
        ended_s = seen.done_s[seen.taken + steps - 1]
        ran = seen.take(steps, [effect.plan for effect in effects if isinstance(effect, RunStep)])
        self.skipped += steps
        return CaughtUp(ended_s, [effect for effect in effects if isinstance(effect, Send)], ran)


class CaughtUp(NamedTuple):
    """When the last of some quiet steps ended, what the worker says after them, and what ran when."""

    ended_s: float
    sends: list[Send]
    ran: list[tuple[DecodeRows, Span]]


@cache
def _takes_arrays(kind: type[CostModel]) -> bool:
    return issubclass(kind, ManySteps)


def _seconds(device: Device, cost: CostModel, plan: DecodeRows, steps: int) -> np.ndarray:
    """Of so many steps like the plan, f64[steps]: each reads a token a slot more than the one before it."""
    contexts = device.held_tokens(plan.active) + len(plan.active) * np.arange(1, steps + 1)
    if _takes_arrays(type(cost)):
        return cast(ManySteps, cost).steps_s(plan, contexts)
    return np.array([cost.decode_s(plan, context) for context in contexts.tolist()])


# A prompt that only knows how long it is and, where its trace tells, what its pages are called: it has no words.

MOST_TOKENS = 1 << 32  # of one request


class Names(NamedTuple):
    """What is known of one request's tokens, be they prompt or output."""

    blocks: npt.NDArray[np.int64]  # numbers of its prompt's blocks, each with all blocks before it
    block_tokens: int
    tokens: int  # leading ones that are in those blocks; the others are nobody's but its own
    number: int  # of the request

    def of_pages(self, start: int, stop: int, page_size: int) -> tuple[PageHash, ...]:
        """Of the full pages of tokens [start, stop): the block in which a page ends, and where. Its own are odd.

        Two pages have one name exactly where they end alike in blocks that are equal up to there; this holds whether
        or not pages and blocks divide each other.
        """
        last = np.arange(start + page_size - 1, stop, page_size, dtype=np.int64)
        known, own = last[last < self.tokens], last[last >= self.tokens]
        named = self.blocks[known // self.block_tokens] * self.block_tokens + known % self.block_tokens
        return (*(2 * named).tolist(), *(2 * (own + self.number * MOST_TOKENS) + 1).tolist())


class SimulatedSequence(NamedTokens):
    """Tokens of nothing. Slicing and joining take no time: a prompt of a million is as cheap as one of one."""

    __slots__ = ("_names", "_start", "_stop")

    def __init__(self, tokens: int, names: Names | None = None, start: int = 0) -> None:
        """start: of these tokens in what `names` names."""
        assert tokens >= 0, tokens
        self._start, self._stop, self._names = start, start + tokens, names

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, part: slice) -> SimulatedSequence:
        inside = range(self._start, self._stop)[part]
        return SimulatedSequence(len(inside), self._names, inside.start)

    def __add__(self, other: Sized) -> SimulatedSequence:
        """What a trace does not tell of, such as an answer, is like nothing that any other request has."""
        return SimulatedSequence(len(self) + len(other), self._names, self._start)

    def __repr__(self) -> str:
        return f"Sequence({len(self)})"

    def page_hashes(self, page_size: int, salt: str) -> tuple[PageHash, ...]:
        """None where nothing is known of its tokens. A trace has no salts."""
        assert not salt, salt
        return () if self._names is None else self._names.of_pages(self._start, self._stop, page_size)


class NamedPrompts:
    """Prompts of one trace, by the ids of their blocks."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._numbers: dict[tuple[int, int], int] = {}  # of a block, by the number of that before it (-1) and its id
        self._requests = count()

    def prompt(self, tokens: int, ids: Ids[int]) -> SimulatedSequence:
        """Equal beginnings of `ids` are equal beginnings of prompts. Tokens beyond them are like no other's."""
        numbers, before, blocks = self._numbers, -1, list[int]()
        for each in ids:
            before = numbers.setdefault((before, each), len(numbers))
            blocks.append(before)
        named = min(tokens, len(blocks) * self.block_tokens)
        return SimulatedSequence(
            tokens, Names(np.array(blocks, np.int64), self.block_tokens, named, next(self._requests))
        )


# What a simulated cluster's prefix caches were asked for and had, pool by pool, read off the words of its actors.


class PrefixLookups:
    """A prompt is looked up where it is computed, and where it is decoded if that is another worker."""

    def __init__(self, workers: Sequence[WorkerConfig]) -> None:
        self._roles = {config.worker: config.role for config in workers if config.prefix_caching}
        self.by_role = {role: Lookups() for role in Role if role in self._roles.values()}

    def said(self, actor: WorkerId, effect: Send) -> None:
        """Of every word that may tell of a prompt's beginning; others are of no concern."""
        message = effect.message
        if isinstance(message, Progress):
            self._found(actor, message.cached_tokens)
        elif isinstance(message, StartPrefill):
            tokens = len(message.request.prompt)
            self._looked_up(effect.to, tokens)
            if message.decode_worker != effect.to:
                self._looked_up(message.decode_worker, tokens)
                self._found(message.decode_worker, message.cached_pages * message.decode_page_size)

    def _looked_up(self, worker: WorkerId, tokens: int) -> None:
        if worker in self._roles:
            self.by_role[self._roles[worker]].looked_up += tokens

    def _found(self, worker: WorkerId, tokens: int) -> None:
        if worker in self._roles:
            self.by_role[self._roles[worker]].found += tokens
