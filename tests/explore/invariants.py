"""Laws of whole states; those of single steps (who reads and writes what, what clients hear) are checked on the way.

- Where nothing went wrong, nobody needs a deadline: once nothing is under way, everything is at rest.
- Where nothing is under way and no timer is armed, everything is at rest, whatever went wrong before: each request
  has ended, no page is held on any worker, no abort is open.
- The router knows what each worker has become.
- Faults that a retry mends cost no request, as long as there are retries.
- From every state such an end can be reached (`search.stuck`).
"""

from __future__ import annotations

from jdisagg.core.request import FinishReason, WorkerId
from jdisagg.policy.cache.page_pool import KEEPER
from tests.explore.device import Violation, need
from tests.explore.world import GONE, RUNNING, UNSENT, State, World

NATURAL = (FinishReason.STOP, FinishReason.LENGTH)
# Faults that somebody is told of at once: they need no deadline.
TOLD = ("cancel", "stop", "flip", "burst", "fail", "change")
# Faults that no second attempt mends, or that release twice.
LASTING = ("lose", "leave", "reboot", "cancel", "stop", "fail")


def check_state(world: World, state: State) -> bool:
    """Raises Violation; whether the state is an end: at rest, with nothing to come."""
    if not world.quiet(state) or any(state.queues) or state.strays:
        return False
    unrest = unrest_of(world, state)
    if unrest and is_calm(world, state):
        raise Violation(f"nothing was lost or late, yet only a deadline ends this: {unrest}")
    if unrest and not state.timers:
        raise Violation(f"no state follows: nothing is under way and no timer is armed, and {unrest}")
    return not unrest and not state.timers


def is_calm(world: World, state: State) -> bool:
    """No timer fired, and nothing went wrong so far that nobody is told of."""
    told = {kind: getattr(world.scene.budget, kind) for kind in TOLD}
    return state.now_s == 0.0 and state.budget._replace(**told) == world.scene.budget


def unrest_of(world: World, state: State) -> str:
    """What is not at rest, in words; empty where all is."""
    found = []
    for number, actor in enumerate(state.actors):
        if actor != GONE and world.cast.notes[actor].holds:
            found.append(f"{world.names[number]} holds {world.cast.notes[actor].holds}")
    for request_id, client in zip(world.ids, state.clients, strict=True):
        if client.status in (UNSENT, RUNNING):
            found.append(f"{request_id} has not ended")
    return "; ".join(found)


def check_end(world: World, state: State) -> None:
    """Of an end: no device holds a page for anybody, and faults that may be tried again cost no request."""
    for number, device in enumerate(state.devices, 1):
        held = [page for page, owner in enumerate(world.devices[device].owners) if owner not in (None, KEEPER)]
        need(not held, f"pages {held} of {world.names[number]} are nobody's to give back")
    if world.scene.changes:
        peers = world.cast.thaw(state.actors[0]).peers
        for number, actor in enumerate(state.actors[1:], 1):
            is_now, known = world.config_of(number, actor), peers.get(WorkerId(world.names[number]))
            right = actor == GONE or (known is not None and known.config == is_now)
            need(right, f"the router takes {is_now.worker} for {known and known.config.role}, it is {is_now.role}")
    spent = [had - left for had, left in zip(world.scene.budget, state.budget, strict=True)]
    lasting = sum(getattr(world.scene.budget, kind) - getattr(state.budget, kind) for kind in LASTING)
    if not lasting and not world.scene.slow and sum(spent) <= world.scene.router.max_retries:
        for request_id, client in zip(world.ids, state.clients, strict=True):
            need(client.status in NATURAL, f"{request_id} ends as {client.status}: {sum(spent)} faults cost a request")
