"""Random walks through worlds too large to be seen whole: many requests and workers, and much going wrong at once.

A walk takes one action after the other, drawn from its seed; when the budget of faults is spent, it can only end. A
walk that has not ended after `MAX_STEPS`, or that breaks a law, is a finding, and its seed tells it again.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from jdisagg.core.worker_config import Role, TransferMode
from tests.explore.device import Violation, need
from tests.explore.invariants import check_end, check_state
from tests.explore.scenes import Budget, Scene, request, scene, worker
from tests.explore.search import Found
from tests.explore.steps import follow
from tests.explore.story import tell
from tests.explore.world import Action, State, World

MAX_STEPS = 3000
FAULT_CHANCE = 0.08


@dataclass
class Walked:
    walks: int = 0
    steps: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)

    def line(self) -> str:
        return f"{self.walks} walks, {self.steps} steps, requests ended as {dict(self.outcomes)}"


def large(seed: int) -> Scene:
    """Two prefill and two decode workers, or two that do both; three to five requests that fight for pages."""
    draw = random.Random(seed)
    sizes = {
        "num_pages": draw.choice((4, 5, 8)),
        "num_slots": draw.choice((1, 2)),
        "steps_in_flight": draw.choice((1, 2)),
        "chunks_in_flight": draw.choice((1, 2)),
        "prefill_buckets": draw.choice(((2,), (2, 4))),
        "transfer": draw.choice(list(TransferMode)),
    }
    names = draw.choice(
        (
            (
                ("prefill1", Role.PREFILL),
                ("prefill2", Role.PREFILL),
                ("decode1", Role.DECODE),
                ("decode2", Role.DECODE),
            ),
            (("both1", Role.COLOCATED), ("both2", Role.COLOCATED)),
        )
    )
    workers = [worker(name, role, **sizes) for name, role in names]
    requests = [_request(number, draw) for number in range(1, draw.randint(4, 6))]
    budget = {kind: draw.choice((0, 1, 3)) for kind in Budget._fields if kind != "change"}
    return scene(workers, requests, **{**budget, **_of_whole_processes(draw)})


def _of_whole_processes(draw: random.Random) -> dict[str, int]:
    """Crashes of workers for good, and of the router, are rarer: little is left to see after them."""
    reboot, leave, lose = (draw.choice((0, 0, 1)) for _ in range(3))
    return {"reboot": reboot, "leave": leave, "again": reboot + leave, "lose": lose, "back": lose}


def _request(number: int, draw: random.Random):
    stop = {"stop_token_ids": (100 * number + 2,)} if draw.random() < 0.3 else {}
    return request(number, draw.randint(1, 5), draw.randint(1, 3), **stop)


def walk_many(count: int, first_seed: int) -> Walked:
    """Raises AssertionError with the story of the first walk that breaks a law."""
    walked = Walked()
    for seed in range(first_seed, first_seed + count):
        world = World(large(seed))
        actions: list[Action] = []
        try:
            end = walk(world, seed, actions)
        except Violation as violation:
            story = tell(world, Found(violation=str(violation), trace=actions))
            raise AssertionError(f"seed {seed}: {story}") from violation
        walked.walks += 1
        walked.steps += len(actions)
        walked.outcomes.update(client.status for client in end.clients)
    return walked


def walk(world: World, seed: int, actions: list[Action]) -> State:
    """One walk to its end; `actions` grows with it. Raises Violation."""
    draw, state = random.Random(seed), world.start()
    for _ in range(MAX_STEPS):
        natural = list(world.natural_actions(state))
        faults = list(world.faults(state)) if not natural or draw.random() < FAULT_CHANCE else []
        choices = faults or natural
        if not natural:
            break
        actions.append(draw.choice(choices))
        state = follow(world, state, actions[-1])
        if check_state(world, state):
            check_end(world, state)
    need(check_state(world, state), f"no end after {len(actions)} steps")
    return state
