"""An autoscaler over actors that serve, with toy machines: whatever it does, tokens are the definition's and pages are
back; it does what the load asks for, and a journal of it replays."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from jdisagg.commands.replay import replay
from jdisagg.core.events import ROUTER, ChangeRole, Event
from jdisagg.core.journal import Header, Journal, read_lines
from jdisagg.core.request import Request, WorkerId
from jdisagg.core.router_config import RouterConfig, Routing
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.policy.scaling import SHARES, Load, RoleScaler, Scaling, Standby, pressure
from tests.sim.cases import check_outputs, definition, request, worker
from tests.sim.costs import Costs
from tests.sim.fault_injector import Faults
from tests.sim.world import World

SCALING = Scaling(price_s=1.0, horizon_s=60.0, steady_s=2.0, rest_s=5.0, idle=0.3)
SLOW = Costs(prefill_token_s=0.01)
LOOK_S = 1.0


def house(prefills: int, decodes: int) -> list[WorkerConfig]:
    counts = ((Role.PREFILL, prefills), (Role.DECODE, decodes))
    return [worker(f"{role}-{number}", role) for role, count in counts for number in range(count)]


class ScaledWorld(World):
    """As live: the scaler sees what the router's driver sees, and its flips go the way of an operator's."""

    def __init__(self, workers: list[WorkerConfig], *rest, scaling: Scaling = SCALING, **named) -> None:
        super().__init__(workers, *rest, **named)
        self.scaler = RoleScaler(scaling, workers)
        self.asked: list[tuple[float, WorkerId, Role]] = []
        self._next_look_s, self._seen = LOOK_S, 0

    def _deliver(self, actor: WorkerId, event: Event) -> None:
        self.scaler.observe(actor, event, self.now_s)
        super()._deliver(actor, event)
        for at_s, sender, effect in self.effects[self._seen :]:
            self.scaler.observe(sender, effect, at_s)
        self._seen = len(self.effects)
        if self.now_s >= self._next_look_s:
            self._next_look_s = self.now_s + LOOK_S
            self._look()

    def _look(self) -> None:
        for flip in self.scaler.look(self.now_s):
            self.asked.append((self.now_s, flip.worker, flip.role))
            config = self.workers[flip.worker].config
            self._at(self.now_s, ROUTER, ChangeRole(flip.worker, 7, worker(config.worker, flip.role), 1.0))


def prompts(count: int, over_s: float, start_s: float = 0.0) -> list[Request]:
    return [
        request(f"p{start_s:g}-{n}", 60, max_tokens=2, arrival_s=start_s + over_s * n / count) for n in range(count)
    ]


def outputs(count: int, over_s: float, start_s: float = 0.0) -> list[Request]:
    return [
        request(f"o{start_s:g}-{n}", 4, max_tokens=60, arrival_s=start_s + over_s * n / count) for n in range(count)
    ]


def serve(world: World, requests: list[Request]) -> None:
    for each in requests:
        world.submit(each, each.arrival_s)
    world.run()


def check_all(world: World, requests: list[Request]) -> None:
    check_outputs(world, requests)
    assert [world.output(each.request_id) for each in requests] == [definition(each) for each in requests]
    world.check_all_ended()


def test_prompts_get_prefill_workers_and_outputs_get_them_back():
    world = ScaledWorld(house(2, 3), RouterConfig(queue_timeout_s=0), SLOW)
    course = prompts(120, 30.0) + outputs(40, 20.0, 45.0)
    serve(world, course)
    check_all(world, course)
    first = [role for at_s, _, role in world.asked if at_s < 40.0]
    later = [role for at_s, _, role in world.asked if at_s > 45.0]
    assert first and set(first) == {Role.PREFILL}
    assert not later or later[-1] is Role.DECODE


def test_the_last_worker_of_a_phase_stays_whatever_the_load():
    world = ScaledWorld(house(1, 1), RouterConfig(queue_timeout_s=0), SLOW)
    course = prompts(80, 20.0)
    serve(world, course)
    check_all(world, course)
    assert world.asked == [] and world.scaler.load is not None
    roles = [Standby(each.role).role for each in world.scaler.configs.values()]
    assert pressure(world.scaler.load, roles, SCALING) >= 0.0


def test_a_load_without_contrast_flips_nobody():
    world = ScaledWorld(house(2, 2), None, SLOW)
    course = sorted(prompts(20, 40.0) + outputs(20, 40.0), key=lambda each: each.arrival_s)
    serve(world, course)
    check_all(world, course)
    assert world.asked == []


@pytest.mark.parametrize("routing", [Routing.CACHE_AWARE, Routing.ROUND_ROBIN])
def test_every_routing_serves_while_roles_change(routing):
    world = ScaledWorld(house(1, 4), RouterConfig(routing=routing, queue_timeout_s=0), SLOW)
    course = prompts(70, 20.0) + outputs(15, 10.0, 22.0)
    serve(world, course)
    check_all(world, course)
    assert world.asked


@pytest.mark.parametrize("seed", range(2))
def test_faults_and_flips_together_lose_no_request_and_change_no_token(seed):
    draw = random.Random(seed)
    course = [
        request(f"r{n}", draw.randrange(1, 90), max_tokens=draw.randrange(1, 30), arrival_s=draw.uniform(0, 40))
        for n in range(70)
    ]
    faults = Faults(seed=seed, fail_transfer=0.03, flip_bit=0.03)
    world = ScaledWorld(house(2, 3), RouterConfig(max_retries=50, queue_timeout_s=0), SLOW, faults)
    serve(world, course)
    check_all(world, course)
    assert len(world.asked) <= SCALING.flips_an_hour


def test_a_lost_worker_is_not_counted_on():
    world = ScaledWorld(house(1, 3), RouterConfig(queue_timeout_s=0), SLOW)
    world.lose(WorkerId("decode-2"), 1.0)
    course = prompts(60, 30.0)
    serve(world, course)
    check_all(world, course)
    assert WorkerId("decode-2") not in world.scaler.configs
    assert all(name != "decode-2" for _, name, _ in world.asked)


def test_flips_rest_between_and_the_house_always_serves_both_phases():
    world = ScaledWorld(house(3, 3), RouterConfig(queue_timeout_s=0), SLOW)
    turns = [50.0 * turn for turn in range(2)]
    course = [each for at_s in turns for each in (*prompts(60, 20.0, at_s), *outputs(20, 20.0, at_s + 25))]
    roles = {each.worker: each.role for each in house(3, 3)}
    serve(world, course)
    check_all(world, course)
    assert all(later - sooner >= SCALING.rest_s for (sooner, *_), (later, *_) in pairwise(world.asked))
    for _, name, role in world.asked:
        roles[name] = role
        assert all(any(SHARES[each][phase] for each in roles.values()) for phase in (0, 1))


def test_a_journal_with_flips_replays():
    config, workers = RouterConfig(queue_timeout_s=0), house(1, 3)
    journal = Journal(Header(config, tuple(workers)))
    world = ScaledWorld(workers, config, SLOW, journal=journal)
    course = prompts(60, 20.0)
    serve(world, course)
    check_all(world, course)
    assert world.asked
    assert replay(*read_lines([line + "\n" for line in journal.lines()])) == journal.num_recorded


def test_load_is_what_the_look_before_saw():
    scaler = RoleScaler(SCALING, house(1, 1))
    assert scaler.look(0.0) == [] and scaler.load is None
    scaler.load = Load(0.0, 0.0)
    assert scaler.look(1.0) == [] and scaler.load is None
