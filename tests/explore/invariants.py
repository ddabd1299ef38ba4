"""Laws of whole states; those of single steps (who reads and writes what, what clients hear) are checked on the way.

- Where nothing went wrong, nobody needs a deadline: once nothing is under way, everything is at rest.
- Where nothing is under way and no timer is armed, everything is at rest, whatever went wrong before: each request
  has ended, no page is held on any worker, no abort is open.
- From every state such an end can be reached (`search.stuck`).
"""

from __future__ import annotations

from tests.explore.device import Violation, need
from tests.explore.world import GONE, RUNNING, UNSENT, State, World


def check_state(world: World, state: State) -> bool:
    """Raises Violation; whether the state is an end: at rest, with nothing to come."""
    if not world.quiet(state) or state.strays:
        return False
    unrest = unrest_of(world, state)
    if unrest and is_calm(world, state):
        raise Violation(f"nothing was lost or late, yet only a deadline ends this: {unrest}")
    if unrest and not state.timers:
        raise Violation(f"no state follows: nothing is under way and no timer is armed, and {unrest}")
    return not unrest and not state.timers


def is_calm(world: World, state: State) -> bool:
    """Nothing went wrong so far, and no timer fired."""
    cancels = world.scene.budget.cancel - state.budget.cancel
    return state.now_s == 0.0 and state.budget._replace(cancel=state.budget.cancel + cancels) == world.scene.budget


def unrest_of(world: World, state: State) -> str:
    """What is not at rest, in words; empty where all is."""
    found = []
    for number, actor in enumerate(state.actors):
        if actor != GONE and world.cast.holds[actor]:
            found.append(f"{world.names[number]} holds {world.cast.holds[actor]}")
    for request_id, client in zip(world.ids, state.clients, strict=True):
        if client.status in (UNSENT, RUNNING):
            found.append(f"{request_id} has not ended")
    return "; ".join(found)


def check_end(world: World, state: State) -> None:
    """Of an end: no device holds a page for anybody."""
    for number, device in enumerate(state.devices, 1):
        held = [page for page, owner in enumerate(world.devices[device].owners) if owner is not None]
        need(not held, f"pages {held} of {world.names[number]} are nobody's to give back")
