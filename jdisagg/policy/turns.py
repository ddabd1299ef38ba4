"""How many tokens of each row the next step of a worker draws, where its programs take several turns a dispatch.

No turn is taken that somebody could use better, or that a client would notice: while a dispatch runs nobody is seated,
no prompt is computed, and what it draws comes all at once when it ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from jdisagg.core.request import SamplingParams
from jdisagg.core.steps import DecodeRows
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.decode_sequence import DecodeSequence
from jdisagg.policy.step_times import StepTimes

MOST_GAP_S = 0.04  # between two bunches of tokens of a stream: a reader sees no halt
FEW = 8  # turns at most while none has been timed, or while somebody waits for a row that may end at any of them
KEPT = 17  # last times; their lower quartile counts, for what else a machine does only adds


class TurnTimes:
    """How long a turn takes, as steps have ended."""

    def __init__(self, config: WorkerConfig) -> None:
        self._used, self._steps = config.decode.steps_per_dispatch > 1, StepTimes()
        self._last: deque[float] = deque(maxlen=KEPT)
        self.turn_s: float | None = None  # None before any has ended

    def dispatched(self, step_id: int, rows: DecodeRows, now_s: float) -> None:
        if self._used:
            turns = 0 if max(rows.widths, default=1) > 1 and not rows.turns else rows.num_turns
            self._steps.dispatched(step_id, turns, now_s)

    def failed(self, step_id: int) -> None:
        if self._used:
            self._steps.failed(step_id)

    def done(self, step_id: int, now_s: float) -> None:
        if not self._used:
            return
        turns, seconds = self._steps.done(step_id, now_s)
        if not turns:
            return  # it verified drafts
        self._last.append(seconds / turns)
        self.turn_s = sorted(self._last)[len(self._last) // 4]

    @property
    def within_gap(self) -> float:
        """Turns that end within the gap."""
        return MOST_GAP_S / self.turn_s if self.turn_s else FEW


def one_by_one(sampling: SamplingParams, config: WorkerConfig) -> bool:
    """Whether each of its tokens takes a step of its own: one that depends on how the last one is read, or that a
    worker's programs of several turns do not draw."""
    if config.takes_all_slots:
        return sampling.synchronous
    return sampling.synchronous or sampling.penalised or sampling.logprobs is not None


def most_turns(
    config: WorkerConfig, seated: Sequence[DecodeSequence], left: Sequence[int], times: TurnTimes, *, ready: bool,
    expects: bool, prompts: bool,
) -> int:  # fmt: skip
    """Turns that nothing else is wanted for. left: tokens that each of `seated` may still draw.

    Where somebody is `ready` for a slot, until the first is sure to come free, and a few where one may at any turn;
    where the worker `expects` KV, a quarter; where `prompts` wait to be computed between its steps, one.
    """
    if not seated or prompts or any(one_by_one(sequence.sampling, config) for sequence in seated):
        return 1
    turns = int(max(1, min(config.decode.steps_per_dispatch, times.within_gap)))
    if ready:
        may_stop = any(sequence.sampling.stop_token_ids for sequence in seated)
        return min(turns, FEW if may_stop else turns, *left)
    return max(1, turns // 4) if expects else turns
