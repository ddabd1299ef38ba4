"""What comes of an action: the state that follows, and the laws that every step keeps.

Clients hear their tokens in order and once, and one end; every wait has an armed timer; whoever believes that a
reservation is complete is right. What machines read and write is checked in `device.py`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from jdisagg.core import events as ev
from jdisagg.core.messages import Ack
from jdisagg.core.request import Attempt, FinishReason, RequestId, WorkerId
from tests.explore.below import PagesLent, landed
from tests.explore.device import Violation, fresh_device, name, need
from tests.explore.moves import Over, Post, Timer, Told
from tests.explore.world import CUT, GONE, REJECTED, RUNNING, Action, Client, State, World

DRAIN_S = 3.0  # what a worker that is to change has, may take so long to end
JUNK = Attempt(RequestId("nobody"), 0)


def follow(world: World, state: State, action: Action) -> State:
    """The next state. Raises Violation where a law is broken on the way."""
    return Draft(world, state).take(action)


class Draft:
    """A state on its way to the next."""

    def __init__(self, world: World, state: State) -> None:
        self.world, self.before = world, state
        self.now_s, self.life = state.now_s, state.life
        self.actors, self.queues, self.strays = list(state.actors), list(state.queues), list(state.strays)
        self.timers, self.devices, self.clients = list(state.timers), list(state.devices), list(state.clients)
        self.budget = state.budget
        self._dooms = False

    def take(self, action: Action) -> State:
        if not self.world.natural(action):
            left = getattr(self.budget, action.kind)
            self.budget = self.budget._replace(**{action.kind: left - 1})
        getattr(self, f"_{action.kind}")(action)
        return State(
            self.now_s,
            tuple(self.actors),
            tuple(self.queues),
            tuple(sorted(self.strays)),
            tuple(self.timers),
            tuple(self.devices),
            tuple(self.clients),
            self.budget,
            self.life,
        )

    # ------------------------------------------------------------ actions

    def _submit(self, action: Action) -> None:
        request = self.world.scene.requests[action.which]
        self.clients[action.which] = Client(RUNNING)
        self._deliver_item(self.world.item(0, ev.Submit(request)))

    def _again(self, action: Action) -> None:
        self._submit(action)

    def _cancel(self, action: Action) -> None:
        self._deliver_item(self.world.item(0, ev.Cancel(self.world.ids[action.which])))

    def _stop(self, action: Action) -> None:
        self._deliver_item(self.world.item(0, ev.Cancel(self.world.ids[action.which], FinishReason.STOP)))

    def _deliver(self, action: Action) -> None:
        self._deliver_item(self._pop(action))

    def _pop(self, action: Action) -> int:
        queue = self.queues[action.which]
        self.queues[action.which] = queue[: action.at] + queue[action.at + 1 :]
        return queue[action.at]

    def _stray(self, action: Action) -> None:
        self._deliver_item(self.strays.pop(action.which))

    def _loss(self, action: Action) -> None:
        self._pop(action)

    def _flip(self, action: Action) -> None:
        to, event, shipment = self.world.items[self._pop(action)]
        assert isinstance(event, ev.KVArrived)
        junk = tuple(content._replace(owner=JUNK) for content in shipment)
        self._deliver_item(self.world.item(to, replace(event, intact=False), junk))

    def _torn(self, action: Action) -> None:
        to, event, shipment = self.world.items[self._pop(action)]
        assert isinstance(event, ev.PagesMoved)
        self._deliver_item(self.world.item(to, replace(event, good=(False,) * len(event.good)), shipment))

    def _burst(self, action: Action) -> None:
        event = self.world.items[self._pop(action)].event
        assert isinstance(event, ev.KVArrived)
        transfer, source = event.transfer, self.world.queue_names[action.which][1]
        told = ev.EngineFailed(None, "the transfer failed", transfer.attempt, transfer.part)
        self._post(Post(("news", source, source), self.world.item(source, told)))

    def _fail(self, action: Action) -> None:
        self._dooms = True
        self._deliver(action)

    def _late(self, action: Action) -> None:
        self.strays.append(self._pop(action))

    def _dup(self, action: Action) -> None:
        item = self._pop(action)
        self.strays.append(item)
        self._deliver_item(item)

    def _timer(self, action: Action) -> None:
        timer = self.timers.pop(action.which)
        self.now_s = max(self.now_s, timer.at_s)
        self._deliver_item(self.world.timer_item(timer))

    def _early(self, action: Action) -> None:
        self._timer(action)

    def _restart(self, action: Action) -> None:
        self._clear(action.which)
        self.actors[action.which] = self.world.fresh_actor(action.which, 0)

    def _lose(self, action: Action) -> None:
        number = action.which
        self._clear(number)
        self.actors[number] = GONE
        self.queues = [
            () if name[2] == number else queue for name, queue in zip(self.world.queue_names, self.queues, strict=True)
        ]
        self.strays = [item for item in self.strays if self.world.items[item].to != number]
        lost = ev.WorkerLost(self.world.scene.workers[number - 1].worker)
        self._post(Post(("news", 0, 0), self.world.item(0, lost)))

    def _clear(self, number: int) -> None:
        """What a worker's process and its devices held is gone, and what they were doing."""
        self.timers = [timer for timer in self.timers if timer.actor != number]
        for kind in ("prefill", "decode", "news"):
            self.queues[self.world.queue_at[kind, number, number]] = ()
        self.devices[number - 1] = self.world.device(fresh_device(self.world.scene.workers[number - 1]))

    def _reboot(self, action: Action) -> None:
        self.life += 1
        workers = [self.world.config_of(number, self.actors[number]) for number in self.world.machines]
        self.actors[0] = self.world.fresh_actor(0, self.life, workers)
        self.timers = [timer for timer in self.timers if timer.actor != 0]
        self.clients = [each._replace(status=CUT) if each.status == RUNNING else each for each in self.clients]

    def _change(self, action: Action) -> None:
        target = self.world.scene.changes[action.which]
        self._deliver_item(self.world.item(0, ev.ChangeRole(target.worker, 1, target, DRAIN_S)))

    def _back(self, action: Action) -> None:
        self.actors[action.which] = self.world.fresh_actor(action.which, 0)
        self._join(action.which)

    def _join(self, number: int) -> None:
        """By the way that its words go: what it says later is heard later."""
        joined = self.world.item(0, ev.WorkerJoined(self.world.config_of(number, self.actors[number])))
        self._post(Post(("mail", number, 0) if self.world.scene.changes else ("news", 0, 0), joined))

    def _leave(self, action: Action) -> None:
        self._reboot(action)
        self.actors[0] = self.world.lonely_router(self.life)
        self.queues = [
            () if kind in ("mail", "news") and 0 in (a, b) else queue
            for (kind, a, b), queue in zip(self.world.queue_names, self.queues, strict=True)
        ]
        self.strays = [item for item in self.strays if not self._by_router(item)]
        for number in self.world.machines:
            self._post(Post(("news", number, number), self.world.item(number, ev.RouterLost())))

    def _by_router(self, item: int) -> bool:
        to, event, _ = self.world.items[item]
        return to == 0 or (isinstance(event, ev.Received) and event.sender == ev.ROUTER)

    # ------------------------------------------------------------ events and their effects

    def _landed(self, item: int) -> int | None:
        """Pages that another worker has lent are looked at by the machine first."""
        to, event, shipment = self.world.items[item]
        if not isinstance(event, PagesLent):
            return item
        found = landed(self.world.devices[self.devices[to - 1]], event, len(shipment))
        if found is None:
            return None
        self.devices[to - 1] = self.world.device(found[0])
        return self.world.item(to, found[1], shipment)

    def _deliver_item(self, delivered: int) -> None:
        number = self.world.items[delivered].to
        if self.actors[number] == GONE:
            return
        item = self._landed(delivered)
        if item is None:
            return
        reaction = self.world.react(self.actors[number], item, self.now_s)
        self._check_lease(self.actors[number], reaction.after, self.world.items[item].event)
        changed = reaction.after != self.actors[number]
        self.actors[number] = reaction.after
        for move in reaction.moves:
            self._act(number, move)
        self._check_waits(number)
        self._check_beliefs(number, self.world.items[item].event)
        if changed:
            self._forget_idle_timers(number)
        if isinstance(self.world.items[item].event, ev.RouterLost):
            self._join(number)

    def _check_waits(self, number: int) -> None:
        armed = {timer.key: timer.at_s for timer in self.timers if timer.actor == number}
        for key, deadline_s in self.world.cast.notes[self.actors[number]].waits:
            ends_s = armed.get(key, math.inf)
            need(key in armed and ends_s <= deadline_s, f"{self.world.names[number]} waits without a deadline: {key}")

    def _check_lease(self, before: int, after: int, event: ev.Event | PagesLent) -> None:
        """No lease ends while its source lives, where nothing went wrong."""
        if isinstance(event, ev.TimerFired) and self.budget == self.world.scene.budget:
            notes = self.world.cast.notes
            ended = notes[before].unfilled - notes[after].unfilled
            alive = {owner for actor in self.actors if actor != GONE for owner in notes[actor].prompts}
            need(not ended & alive, f"{event.key}: a lease ends while the prompt's source lives")

    def _check_beliefs(self, number: int, event: ev.Event | PagesLent) -> None:
        """Whoever believes that a reservation is complete is right."""
        if self.budget.dup < self.world.scene.budget.dup:
            # a copy of Reserve may make a second reservation of one that is over, which waits for its lease to end
            return
        for decode, owner in self.world.cast.notes[self.actors[number]].decoding:
            self._need_filled(decode, owner, "the router believes")
        match event:
            case ev.Received(sender, Ack(attempt)):
                self._need_filled(sender, attempt, f"{self.world.names[number]} is told by Ack")

    def _need_filled(self, worker: WorkerId, owner: Attempt, who: str) -> None:
        actor = self.actors[self.world.names.index(worker)]
        unfilled = actor != GONE and owner in self.world.cast.notes[actor].unfilled
        need(not unfilled, f"{who} that {name(owner)} decodes on {worker}, where its KV is not complete")

    def _act(self, number: int, move: Any) -> None:
        match move:
            case Post():
                self._post(move)
            case ("step", plan, *_) if self._doomed(number):
                told = ev.EngineFailed(plan.step_id, "the step failed")
                phase = "prefill" if plan.decode is None else "decode"
                self._post(Post((phase, number, number), self.world.item(number, told)))
            case Timer(_, key):
                self.timers = [timer for timer in self.timers if timer[:2] != (number, key)]
                self.timers.append(move)
            case Told(request_id, tokens):
                self._emit(request_id, tokens)
            case Over(request_id, reason):
                self._finish(request_id, reason) if reason else self._end(request_id, REJECTED)
            case tuple():
                self.devices[number - 1], posts = self.world.machine_step(number, self.devices[number - 1], move)
                for post in posts:
                    self._post(post)

    def _doomed(self, number: int) -> bool:
        """Whether a plan fails that is sent now: it may build on one whose failure its worker has not heard of."""
        under_way = [self.queues[self.world.queue_at[kind, number, number]] for kind in ("prefill", "decode")]
        waiting = [self.world.items[item].event for queue in under_way for item in queue]
        return self._dooms or any(isinstance(event, ev.EngineFailed) for event in waiting)

    def _post(self, post: Post) -> None:
        at = self.world.queue_at[post.queue]
        if self.actors[post.queue[2]] != GONE:
            self.queues[at] = (*self.queues[at], post.item)

    def _forget_idle_timers(self, number: int) -> None:
        """Timers of what is over do nothing when they fire; without them, states that are alike are equal."""
        self.timers = [timer for timer in self.timers if timer.actor != number or self._matters(timer)]

    def _matters(self, timer: Timer) -> bool:
        actor, item = self.actors[timer.actor], self.world.timer_item(timer)
        try:
            reaction = self.world.react(actor, item, max(self.now_s, timer.at_s))
        except Violation:
            return True
        return reaction.after != actor or bool(reaction.moves)

    # ------------------------------------------------------------ clients

    def _emit(self, request_id: RequestId, tokens: tuple[int, ...]) -> None:
        place = self.world.ids.index(request_id)
        client = self.clients[place]
        expected = self.world.scene.outputs[request_id][client.told : client.told + len(tokens)]
        need(client.status == RUNNING, f"{request_id} is told tokens {list(tokens)}, and it is {client.status}")
        need(tokens == expected, f"{request_id} is told tokens {list(tokens)}, not {list(expected)}")
        self.clients[place] = client._replace(told=client.told + len(tokens))

    def _finish(self, request_id: RequestId, reason: FinishReason) -> None:
        place = self.world.ids.index(request_id)
        told, sampling = self.clients[place].told, self.world.scene.requests[place].sampling
        if reason is FinishReason.LENGTH:
            need(
                told == sampling.max_tokens, f"{request_id} ends as length with {told} of {sampling.max_tokens} tokens"
            )
        elif reason is FinishReason.STOP and self.budget.stop == self.world.scene.budget.stop:
            last = self.world.scene.outputs[request_id][told - 1]
            need(told > 0 and last in sampling.stop_token_ids, f"{request_id} ends as stop after token {last}")
        elif reason is FinishReason.ABORT:
            need(self.budget.cancel < self.world.scene.budget.cancel, f"{request_id} ends as abort; nobody cancelled")
        self._end(request_id, str(reason))

    def _end(self, request_id: RequestId, status: str) -> None:
        place = self.world.ids.index(request_id)
        need(
            self.clients[place].status == RUNNING, f"{request_id} ends as {status}: it was {self.clients[place].status}"
        )
        self.clients[place] = self.clients[place]._replace(status=status)
