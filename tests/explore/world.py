"""A whole cluster as one value: actors, mail under way, timers, devices, clients, and what may still go wrong.

`actions` lists all that may happen next; `steps.follow` says what comes of one of them. Time passes
only when a timer fires: the present becomes its deadline. Whatever may happen, may happen in any order; what real
clusters do seldom is counted against the scene's budget.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import Any, NamedTuple

from jdisagg.core import events as ev
from jdisagg.core.request import WorkerId
from jdisagg.core.steps import KVTransfer
from jdisagg.core.tiers import PageMove, Tier
from jdisagg.core.worker_config import WorkerConfig
from tests.explore import below
from tests.explore.actors import ActorPatch, Part, StateTable, new_router, new_worker
from tests.explore.device import Content, Device, Machine, fresh_device, need
from tests.explore.moves import Moves, Post, Timer
from tests.explore.scenes import Budget, Scene
from tests.explore.shapes import shape_of

GONE = -1
UNSENT, RUNNING, CUT, REJECTED = "unsent", "running", "cut", "rejected"
SCHEDULE = "mail", "kv", "prefill", "decode", "news"  # kinds of queues; the first two go over a network


class Client(NamedTuple):
    """`status`: UNSENT, RUNNING, CUT, REJECTED or a FinishReason. `told`: tokens it has been given."""

    status: str = UNSENT
    told: int = 0


class State(NamedTuple):
    now_s: float
    actors: tuple[int, ...]  # numbers in the cast, the router's first; GONE
    queues: tuple[tuple[int, ...], ...]  # items under way, the next to arrive first
    strays: tuple[int, ...]  # items that were overtaken, or are copies
    timers: tuple[Timer, ...]
    devices: tuple[int, ...]
    clients: tuple[Client, ...]
    budget: Budget
    life: int = 0  # times the router was started again


class Item(NamedTuple):
    """An event on its way to an actor."""

    to: int
    event: ev.Event | below.PagesLent
    shipment: tuple[Content, ...] = ()  # what KVArrived brings


class Action(NamedTuple):
    kind: str
    which: int = 0  # a queue, a stray, a timer, an actor, a client, or a change
    at: int = 0  # place in the queue


@dataclass(frozen=True, slots=True)
class Reaction:
    """What an actor made of an event."""

    after: int
    effects: tuple[Any, ...]
    moves: tuple[Any, ...]  # the effects as the world carries them out


STRAYS = -1
NOBODY = Part(-1, (), (), ())


class World:
    """Of one scene: nothing in it changes but what it remembers."""

    def __init__(self, scene: Scene, patch: ActorPatch | None = None) -> None:
        self.scene = scene
        self.cast = StateTable(patch)
        self.names = ("router", *[each.worker for each in scene.workers])
        requests = {each.request_id: each for each in scene.requests}
        self.ids = list(requests)
        self.machines = {
            number: Machine(config, requests, scene.outputs) for number, config in enumerate(scene.workers, 1)
        }
        self.queue_names = [*self._pairs("mail", range(len(self.names))), *self._pairs("kv", self.machines)]
        self.num_network = len(self.queue_names)
        self.queue_names += [(kind, number, number) for kind in ("prefill", "decode") for number in self.machines]
        self.queue_names += [("news", number, number) for number in range(len(self.names))]
        self.queue_at = {name: at for at, name in enumerate(self.queue_names)}
        self.items: list[Item] = []
        self.item_parts: list[Part] = []
        self.devices: list[Device] = []
        self.device_parts: list[Part] = []
        self._item_ids: dict[Item, int] = {}
        self._device_ids: dict[Device, int] = {}
        self._timer_parts: dict[tuple[int, str], Part] = {}
        self._timer_items: dict[tuple[int, str], int] = {}
        self._queue_parts: dict[tuple[int, tuple[int, ...]], Part] = {}
        self._timers_parts: dict[tuple[Timer, ...], Part] = {}
        self._outsides: dict[tuple[tuple[Client, ...], Budget], int] = {}
        self._reactions: dict[tuple[int, int, float], Reaction] = {}
        self._machine_steps: dict[tuple[int, int, Any], tuple[int, tuple[Post, ...]]] = {}

    def _pairs(self, kind: str, numbers: Any) -> list[tuple[str, int, int]]:
        return [(kind, a, b) for a in numbers for b in numbers if a != b]

    # ------------------------------------------------------------ numbers for things

    def _part(self, value: Any, owner: int = 0) -> Part:
        return self.cast.part(shape_of(value), owner)

    def item(self, to: int, event: ev.Event | below.PagesLent, shipment: tuple[Content, ...] = ()) -> int:
        item = Item(to, event, shipment)
        number = self._item_ids.get(item)
        if number is None:
            number = self._item_ids[item] = len(self.items)
            self.items.append(item)
            self.item_parts.append(self._part((to, event, shipment), to))
        return number

    def device(self, device: Device) -> int:
        number = self._device_ids.get(device)
        if number is None:
            number = self._device_ids[device] = len(self.devices)
            self.devices.append(device)
            self.device_parts.append(self._part(device))
        return number

    def timer_item(self, timer: Timer) -> int:
        item = self._timer_items.get(timer[:2])
        if item is None:
            item = self._timer_items[timer[:2]] = self.item(timer.actor, ev.TimerFired(timer.key))
        return item

    def _timer_part(self, timer: Timer) -> Part:
        part = self._timer_parts.get(timer[:2])
        if part is None:
            part = self._timer_parts[timer[:2]] = self._part((timer.actor, timer.key))
        return part

    # ------------------------------------------------------------ the beginning

    def start(self) -> State:
        fresh = [self.fresh_actor(number, 0) for number in range(len(self.names))]
        devices = [self.device(fresh_device(each)) for each in self.scene.workers]
        queues = ((),) * len(self.queue_names)
        clients = (Client(),) * len(self.ids)
        return State(0.0, tuple(fresh), queues, (), (), tuple(devices), clients, self.scene.budget)

    def lonely_router(self, life: int) -> int:
        """One that no worker has joined yet."""
        return self.cast.add(0, new_router(self.scene.router, (), life))

    def config_of(self, number: int, actor: int) -> WorkerConfig:
        """What worker `number` is now: its role may have changed."""
        return self.scene.workers[number - 1] if actor == GONE else self.cast.thaw(actor).config

    def fresh_actor(self, number: int, life: int, workers: Sequence[WorkerConfig] = ()) -> int:
        """workers: that a router is told of; those of the scene where nobody says."""
        if number == 0:
            life = life if self.cast.patch.fresh_epochs else 0
            return self.cast.add(0, new_router(self.scene.router, workers or self.scene.workers, life))
        return self.cast.add(number, new_worker(self.scene.workers[number - 1]))

    # ------------------------------------------------------------ what two states have in common

    def key(self, state: State) -> bytes:
        """Equal for states of one future; 16 bytes of BLAKE2b over a state's forms, epochs, plans and times."""
        parts = [self.cast.parts[actor] if actor != GONE else NOBODY for actor in state.actors]
        parts += [self.device_parts[device] for device in state.devices]
        parts += [self._queue_part(at, queue) for at, queue in enumerate(state.queues) if queue]
        parts += [self._queue_part(STRAYS, state.strays), self._timers_part(state.timers)]
        forms, epochs, plans, times = [self._outside(state)], [0], [], []
        for part in parts:
            forms.append(part.form)
            epochs += part.epochs
            plans += part.plans
            times += part.times
        rank = {epoch: place for place, epoch in enumerate(sorted(set(epochs)))}
        order = {plan: place for place, plan in enumerate(sorted(set(plans)))}
        forms += [rank[epoch] for epoch in epochs]
        forms += [order[plan] for plan in plans]
        now_s = state.now_s
        left = [at_s - now_s if at_s > now_s else 0.0 for at_s in times]
        return blake2b(array("q", forms).tobytes() + array("d", left).tobytes(), digest_size=16).digest()

    def _outside(self, state: State) -> int:
        outside = self._outsides.get((state.clients, state.budget))
        if outside is None:
            outside = self._outsides[state.clients, state.budget] = self.cast.form((state.clients, state.budget))
        return outside

    def _queue_part(self, at: int, queue: tuple[int, ...]) -> Part:
        part = self._queue_parts.get((at, queue))
        if part is None:
            parts = [self.item_parts[item] for item in queue]
            if at == STRAYS or (self.scene.any_order and at < self.num_network):
                parts.sort()
            part = self._queue_parts[at, queue] = self._joined(("queue", at), parts)
        return part

    def _timers_part(self, timers: tuple[Timer, ...]) -> Part:
        part = self._timers_parts.get(timers)
        if part is None:
            parts = sorted(self._timer_part(timer)._replace(times=(timer.at_s,)) for timer in timers)
            part = self._timers_parts[timers] = self._joined(("timers",), parts)
        return part

    def _joined(self, name: tuple[Any, ...], parts: list[Part]) -> Part:
        form = self.cast.form((*name, *[part.form for part in parts]))
        epochs = tuple(chain.from_iterable(part.epochs for part in parts))
        plans = tuple(chain.from_iterable(part.plans for part in parts))
        return Part(form, epochs, plans, tuple(chain.from_iterable(part.times for part in parts)))

    # ------------------------------------------------------------ what may happen

    def quiet(self, state: State) -> bool:
        """Time may pass: nothing that is quick is under way (what was overtaken is not), no client is still to come."""
        slow = ("prefill",) if self.scene.slow else ()
        quick = (queue for at, queue in enumerate(state.queues) if self.queue_names[at][0] not in slow)
        return not any(quick) and all(client.status != UNSENT for client in state.clients)

    def actions(self, state: State) -> Iterator[Action]:
        yield from self.natural_actions(state)
        yield from self.faults(state)

    def natural_actions(self, state: State) -> Iterator[Action]:
        """What happens of itself."""
        for number, client in enumerate(state.clients):
            if client.status == UNSENT:
                yield Action("submit", number)
        for at, queue in enumerate(state.queues):
            places = len(queue) if self.scene.any_order and at < self.num_network else min(1, len(queue))
            for place in range(places):
                if queue[place] not in queue[:place]:
                    yield Action("deliver", at, place)
        for place, item in enumerate(state.strays):
            if item not in state.strays[:place]:
                yield Action("stray", place)
        if self.quiet(state) and state.timers:
            due_s = max(state.now_s, min(timer.at_s for timer in state.timers))
            for place, timer in enumerate(state.timers):
                if timer.at_s <= due_s:
                    yield Action("timer", place)

    def faults(self, state: State) -> Iterator[Action]:
        """What goes wrong, or comes at an odd time, as far as the budget allows."""
        left = state.budget
        for at in range(self.num_network):
            if state.queues[at]:
                kinds = [("loss", left.loss), ("dup", left.dup), ("late", left.late and len(state.queues[at]) > 0)]
                yield from (Action(kind, at) for kind, some in kinds if some)
                yield from self._kv_faults(state, at)
        if left.torn:
            heads = [(at, self.items[queue[0]].event) for at, queue in enumerate(state.queues) if queue]
            yield from (Action("torn", at) for at, event in heads if isinstance(event, ev.PagesMoved))
        if left.fail:
            yield from (Action("fail", at) for at, queue in enumerate(state.queues) if queue and self._plans(state, at))
        if left.early:
            timely = {action.which for action in self.natural_actions(state) if action.kind == "timer"}
            yield from (Action("early", place) for place in range(len(state.timers)) if place not in timely)
        for number in self.machines:
            here = [("restart", left.restart), ("lose", left.lose)]
            kinds = here if state.actors[number] != GONE else [("back", left.back)]
            yield from (Action(kind, number) for kind, some in kinds if some)
        if left.change:
            yield from (Action("change", at) for at in range(len(self.scene.changes)))
        yield from (Action(kind) for kind, some in (("reboot", left.reboot), ("leave", left.leave)) if some)
        for number, client in enumerate(state.clients):
            if left.cancel and client.status == RUNNING:
                yield Action("cancel", number)
            if left.stop and client.status == RUNNING and client.told:
                yield Action("stop", number)
            if left.again and client.status == CUT:
                yield Action("again", number)

    def _kv_faults(self, state: State, at: int) -> Iterator[Action]:
        if isinstance(self.items[state.queues[at][0]].event, ev.KVArrived):
            kinds = [("flip", state.budget.flip), ("burst", state.budget.burst)]
            yield from (Action(kind, at) for kind, some in kinds if some)

    def _plans(self, state: State, at: int) -> bool:
        """Whether the head of a queue leads to a plan."""
        item = state.queues[at][0]
        actor = state.actors[self.items[item].to]
        if actor == GONE or isinstance(self.items[item].event, below.PagesLent):
            return False
        moves = self.react(actor, item, state.now_s).moves
        return any(isinstance(move, tuple) and move[0] == "step" for move in moves)

    def natural(self, action: Action) -> bool:
        return action.kind in ("submit", "deliver", "stray", "timer")

    # ------------------------------------------------------------ what comes of it

    def react(self, actor: int, item: int, now_s: float) -> Reaction:
        known = self._reactions.get((actor, item, now_s))
        if known is None:
            number, event, shipment = self.items[item]
            assert not isinstance(event, below.PagesLent), "machines take it first"
            after, effects = self.cast.step(number, actor, event, now_s)
            moves = Moves(number, self.names, self.item, shipment).take(effects)
            self._check_answered(event, effects)
            known = self._reactions[actor, item, now_s] = Reaction(after, tuple(effects), moves)
        return known

    def _check_answered(self, event: ev.Event, effects: list[Any]) -> None:
        if isinstance(event, ev.KVArrived):
            answers = [each for each in effects if isinstance(each, ev.InsertKV | ev.DropKV)]
            need(len(answers) == 1, f"KV that arrived is answered by {answers}")

    def machine_step(self, number: int, device: int, move: tuple[Any, ...]) -> tuple[int, tuple[Post, ...]]:
        known = self._machine_steps.get((number, device, move))
        if known is None:
            after, posts = self._machine_step(number, self.devices[device], move)
            known = self._machine_steps[number, device, move] = (self.device(after), tuple(posts))
        return known

    def _machine_step(self, number: int, device: Device, move: tuple[Any, ...]) -> tuple[Device, list[Post]]:
        machine, (kind, *rest) = self.machines[number], move
        if kind == "step":
            plan, ships = rest
            device, results = machine.step(device, plan)
            phase = "prefill" if plan.decode is None else "decode"
            posts = [self._ship(number, device, transfer) for transfer in ships]
            return device, posts + [Post((phase, number, number), self.item(number, result)) for result in results]
        if kind in ("insert", "open_gates"):
            device, results = getattr(machine, kind)(device, *rest)
            return device, [Post(("decode", number, number), self.item(number, result)) for result in results]
        if kind == "reshape":
            return fresh_device(rest[0]), [Post(("news", number, number), self.item(number, ev.Reshaped(rest[0])))]
        if kind == "ship":
            return device, [self._ship(number, device, rest[0])]
        if kind == "move_pages":
            device, contents = below.begin(machine, device, rest[0])
            return device, self._moved(number, rest[0], contents)
        if kind == "insert_pages":
            pages, good, shipment = rest
            return below.insert(device, pages, good, shipment, machine.config.worker), []
        if kind == "drop_pages":
            return below.forget(device, rest[0]), []
        return getattr(machine, kind)(device, *rest), []

    def _moved(self, number: int, move: PageMove, contents: tuple[Content, ...]) -> list[Post]:
        """What comes of a move, and where: of one from another worker, nothing until that has sent it."""
        if move.source is Tier.PEER:
            return []
        over, news = ev.PagesMoved(move, (True,) * len(move.source_pages)), ("news", number, number)
        if move.destination is not Tier.PEER:
            return [Post(news, self.item(number, over, contents))]
        assert move.asked is not None, "pages are lent to who asked for them"
        to, lent = self.names.index(move.peer), below.PagesLent(move.asked, WorkerId(self.names[number]))
        return [Post(news, self.item(number, over)), Post(("kv", number, to), self.item(to, lent, contents))]

    def _ship(self, number: int, device: Device, transfer: KVTransfer) -> Post:
        to = self.names.index(transfer.destination)
        arrival = self.item(to, ev.KVArrived(transfer), self.machines[number].pack(device, transfer))
        return Post(("kv", number, to), arrival)
