"""What goes wrong in a virtual world, from a seed: late, lost and doubled messages, lost transfers, failed plans."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Faults:
    """Chances from 0 to 1, each drawn for each thing that happens."""

    seed: int = 0
    jitter_s: float = 0.0  # up to this much is added to a message's way; messages of one pair of actors stay in order
    lose_message: float = 0.0
    double_message: float = 0.0
    lose_transfer: float = 0.0  # the bytes never arrive, and nobody says so
    fail_transfer: float = 0.0  # the engine says that it failed
    flip_bit: float = 0.0  # one bit of a part changes on its way
    fail_plan: float = 0.0

    @property
    def calm(self) -> bool:
        """Nothing is lost and nothing fails: no deadline of a handoff has a reason to run out."""
        chances = self.lose_message, self.lose_transfer, self.fail_transfer, self.flip_bit, self.fail_plan
        return not any(chances)


class FaultInjector:
    """The draws of one world."""

    def __init__(self, faults: Faults) -> None:
        self.faults, self._random = faults, random.Random(faults.seed)

    def delay_s(self) -> float:
        return self._random.random() * self.faults.jitter_s if self.faults.jitter_s else 0.0

    def occurs(self, chance: float) -> bool:
        return chance > 0 and self._random.random() < chance
