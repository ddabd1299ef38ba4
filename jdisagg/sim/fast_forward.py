"""Repeating decode steps, run ahead of the clock: when each ends, so that one event can stand for many.

A worker says how many of its next steps are quiet, that is, change only token counts. This module computes exactly
when each ends. An event in between applies the steps that have ended by then; the rest stays valid if the worker
still predicts the same.
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
from jdisagg.sim.cost_models import CostModel, VectorCostModel
from jdisagg.sim.device import TOKEN, Device, InFlightStep, TimeSpan
from jdisagg.sim.outcome import CacheLookups

WORTH = 4  # number of quiet steps from which predicting them costs less than running them


class QuietSteps:
    """The next `steps` quiet step ends of one device, whose plans repeat in a cycle."""

    def __init__(self, device: Device, cost: CostModel, round_of: Sequence[DecodeRows], steps: int) -> None:
        self.device, self.round_of, self.steps = device, round_of, steps
        self.taken = 0
        self._ahead = len(device.flight)
        self._seconds = [
            _seconds(device, cost, plan, len(range(index, steps, len(round_of)))) for index, plan in enumerate(round_of)
        ]
        self.done_s = [each.done_s for each in device.flight]  # then one end per predicted step
        self.done_s += self._one_stage() if len(device.pipeline.free_s) == 1 else self._stages()

    def is_valid(self, repeatable_steps: int) -> bool:
        """Returns True if the worker still predicts the remaining steps and dispatched no other step."""
        return self.steps - self.taken == repeatable_steps and len(self.device.flight) == self._ahead

    @property
    def next_s(self) -> float:
        """Returns the end of the first step that is not predicted to be quiet."""
        return self.done_s[self.steps]

    def ended(self, at_s: float) -> int:
        """Returns the number of quiet steps, not yet applied, that have ended at `at_s`."""
        return bisect_right(self.done_s, at_s, self.taken, self.steps) - self.taken

    def _one_stage(self) -> list[float]:
        """Returns the ends of back-to-back steps: each begins when the one before ends."""
        (seconds,) = self._seconds
        return np.cumsum(np.concatenate((self.done_s[-1:], seconds)))[1:].tolist()

    def _stages(self) -> list[float]:
        pipeline, done_s = self.device.pipeline.copy(), self.done_s.copy()
        for step in range(self.steps):
            done_s.append(pipeline.run_step(done_s[step], *self._step(step)).done_s)
        return done_s[self._ahead :]

    def _step(self, step: int) -> tuple[int, float]:
        """Returns the microbatch and the seconds of the step that follows this end."""
        times, index = divmod(step, len(self.round_of))
        return self.round_of[index].microbatch, float(self._seconds[index][times])

    def take(self, steps: int, flying: Sequence[StepPlan]) -> list[tuple[DecodeRows, TimeSpan]]:
        """Advances the device by `steps` ends and returns the plans that ran with their spans. `flying`: the steps
        dispatched last. Back-to-back steps of one stage are one span."""
        device, first = self.device, self.taken
        self.taken = stop = first + steps
        for index, plan in enumerate(self.round_of):
            size = len(self.round_of)
            device.add_steps(plan.active, len(range(index, stop, size)) - len(range(index, first, size)))
        still_flying = [plan for plan, _ in device.flight][steps:]
        device.flight.clear()
        device.flight.extend(map(InFlightStep, [*still_flying, *flying], self.done_s[stop : stop + self._ahead]))
        if len(device.pipeline.free_s) == 1:
            return [(self.round_of[0], self._pass(first, stop))]
        return [
            (
                self.round_of[step % len(self.round_of)],
                device.pipeline.run_step(self.done_s[step], *self._step(step)),
            )
            for step in range(first, stop)
        ]

    def _pass(self, first: int, stop: int) -> TimeSpan:
        pipeline = self.device.pipeline
        span = TimeSpan(self.done_s[first + self._ahead - 1], self.done_s[stop + self._ahead - 1])
        pipeline.free_s[0] = pipeline.step_done_s[0] = span.done_s
        pipeline.busy_s += span.done_s - span.start_s
        return span


class StepEndSchedule:
    """The next step end of each worker that needs an event; quiet steps before it are applied together."""

    def __init__(self, fast_forward: bool) -> None:
        self.fast_forward = fast_forward
        self.skipped = 0  # steps without an event of their own
        self.foreseen: dict[WorkerId, QuietSteps] = {}
        self._due_s: dict[WorkerId, float] = {}

    def look_ahead(self, name: WorkerId, worker: Worker, device: Device, cost: CostModel) -> float | None:
        """Returns the end of the next step that is not quiet; None if it has been returned before."""
        seen = self.foreseen.get(name)
        quiet = worker.repeatable_steps if self.fast_forward else 0
        if seen is not None and seen.is_valid(quiet):
            return None
        due_s = device.flight[0].done_s
        if quiet < WORTH:
            self.foreseen.pop(name, None)
        else:
            seen = self.foreseen[name] = QuietSteps(device, cost, worker.scheduler.next_round(), quiet)
            due_s = seen.next_s
        if self._due_s.get(name) == due_s:
            return None
        self._due_s[name] = due_s
        return due_s

    def is_due(self, name: WorkerId, now_s: float) -> bool:
        """Returns True if the worker's due step ends now, and clears it."""
        due = self._due_s.get(name) == now_s
        if due:
            del self._due_s[name]
        return due

    def forget(self, name: WorkerId) -> None:
        """Drops the state of a lost worker."""
        self.foreseen.pop(name, None)
        self._due_s.pop(name, None)

    def catch_up(self, name: WorkerId, worker: Worker, at_s: float) -> AppliedSteps | None:
        """Applies the worker's quiet steps that have ended by `at_s`; None if there are none."""
        seen = self.foreseen[name]
        steps = seen.ended(at_s)
        if not steps:
            return None
        effects = worker.end_repeated_steps(steps, TOKEN)
        ended_s = seen.done_s[seen.taken + steps - 1]
        ran = seen.take(steps, [effect.plan for effect in effects if isinstance(effect, RunStep)])
        self.skipped += steps
        return AppliedSteps(ended_s, [effect for effect in effects if isinstance(effect, Send)], ran)


class AppliedSteps(NamedTuple):
    """The end of the last of some quiet steps, the worker's messages after them, and what ran when."""

    ended_s: float
    sends: list[Send]
    ran: list[tuple[DecodeRows, TimeSpan]]


@cache
def _takes_arrays(kind: type[CostModel]) -> bool:
    return issubclass(kind, VectorCostModel)


def _seconds(device: Device, cost: CostModel, plan: DecodeRows, steps: int) -> np.ndarray:
    """Returns f64[steps], the seconds of repeated steps like the plan; each reads one more token per slot."""
    contexts = device.held_tokens(plan.active) + len(plan.active) * np.arange(1, steps + 1)
    if _takes_arrays(type(cost)):
        return cast(VectorCostModel, cost).steps_s(plan, contexts)
    return np.array([cost.decode_s(plan, context) for context in contexts.tolist()])


# Simulated prompts, which have a length and, if the trace knows, page hashes, but no tokens.

MOST_TOKENS = 1 << 32  # per request


class PromptBlocks(NamedTuple):
    """The block hashes of one request's tokens, prompt and output."""

    blocks: npt.NDArray[np.int64]  # ids of its prompt's blocks; an id stands for the block and all blocks before it
    block_tokens: int
    tokens: int  # leading tokens that are in those blocks; the others are unique to the request
    number: int  # number of the request

    def of_pages(self, start: int, stop: int, page_size: int) -> tuple[PageHash, ...]:
        """Returns the hashes of the full pages of tokens [start, stop). A hash is made of the block in which a page
        ends and the offset there; hashes of unique pages are odd. Two pages have one hash exactly if they end at the
        same offset of equal block paths, even if page and block sizes do not divide each other."""
        last = np.arange(start + page_size - 1, stop, page_size, dtype=np.int64)
        known, unique = last[last < self.tokens], last[last >= self.tokens]
        named = self.blocks[known // self.block_tokens] * self.block_tokens + known % self.block_tokens
        return (*(2 * named).tolist(), *(2 * (unique + self.number * MOST_TOKENS) + 1).tolist())


class SimulatedSequence(NamedTokens):
    """A token sequence of a given length without tokens. Slicing and joining take constant time."""

    __slots__ = ("_names", "_start", "_stop")

    def __init__(self, tokens: int, names: PromptBlocks | None = None, start: int = 0) -> None:
        """Makes a sequence of `tokens` tokens that begin at `start` of the tokens in `names`."""
        assert tokens >= 0, tokens
        self._start, self._stop, self._names = start, start + tokens, names

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, part: slice) -> SimulatedSequence:
        inside = range(self._start, self._stop)[part]
        return SimulatedSequence(len(inside), self._names, inside.start)

    def __add__(self, other: Sized) -> SimulatedSequence:
        """Appends tokens that the trace does not know, such as an output; they are unique to the request."""
        return SimulatedSequence(len(self) + len(other), self._names, self._start)

    def __repr__(self) -> str:
        return f"Sequence({len(self)})"

    def page_hashes(self, page_size: int, salt: str) -> tuple[PageHash, ...]:
        """Returns the page hashes; () if the trace has none. A trace has no salts."""
        assert not salt, salt
        return () if self._names is None else self._names.of_pages(self._start, self._stop, page_size)


class NamedPrompts:
    """The prompts of one trace, by the hash ids of their blocks."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._numbers: dict[tuple[int, int], int] = {}  # id of the block before (-1: none), hash id -> block id
        self._requests = count()

    def prompt(self, tokens: int, ids: Ids[int]) -> SimulatedSequence:
        """Returns a prompt. Equal prefixes of `ids` are equal prompt prefixes; tokens after them are unique."""
        numbers, previous, blocks = self._numbers, -1, list[int]()
        for each in ids:
            previous = numbers.setdefault((previous, each), len(numbers))
            blocks.append(previous)
        named = min(tokens, len(blocks) * self.block_tokens)
        return SimulatedSequence(
            tokens, PromptBlocks(np.array(blocks, np.int64), self.block_tokens, named, next(self._requests))
        )


# Prompt tokens that a simulated cluster's prefix caches looked up and found, by role, read from its messages.


class PrefixLookups:
    """Lookup counts by role. A prompt is looked up where it is computed, and at another decode worker as well."""

    def __init__(self, workers: Sequence[WorkerConfig]) -> None:
        self._roles = {config.worker: config.role for config in workers if config.prefix_caching}
        self.by_role = {role: CacheLookups() for role in Role if role in self._roles.values()}

    def on_message(self, actor: WorkerId, effect: Send) -> None:
        """Counts a message if it reports a lookup or its result."""
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
