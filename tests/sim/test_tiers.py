"""Tiers below HBM in the simulated cluster: the very decisions that serve, and moves that take a tier's bandwidth."""

import json
from collections import OrderedDict
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.commands.sim import main
from jdisagg.core.errors import ConfigError
from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.core.request import Attempt, RequestId, WorkerId
from jdisagg.core.router_config import Routing
from jdisagg.core.tiers import PageMove, Tier
from jdisagg.core.worker_config import Role
from jdisagg.policy.cache.prefix_cache import packed
from jdisagg.sim.cluster import PATIENT
from jdisagg.sim.cluster_spec import (
    by_roofline,
    cluster_spec,
    devices_of,
    longest,
    plain_settings,
    with_room,
    with_tiers,
)
from jdisagg.sim.cost_models import Model, Roofline
from jdisagg.sim.hardware import hardware, model_of
from jdisagg.sim.outcome import Outcome
from jdisagg.sim.shared import simulated
from jdisagg.sim.simulation import KVLocation, SpanLog
from jdisagg.sim.tiers import SharedPool, SimulatedTiers, TierRate, TierSpec, rates_said, tier_speeds
from jdisagg.sim.traces import Trace
from tests.sim.cases import worker
from tests.sim.test_prefix_caching import EXCERPT, hit_rate, signature

PAIR, PAGE = "prefill:tp8,decode:tp8", 512
HBM_TOKENS = 60_000  # three prompts of the longest
QUICK: dict[Tier, float] = {Tier.DRAM: 50e9, Tier.DISK: 50e9, Tier.POOL: 50e9, Tier.PEER: 50e9}


@cache
def talks(count: int = 12, turns: int = 4) -> Trace:
    """Conversations of prompts that grow by ten pages a turn, one turn of each after the other, one every three s."""
    rows = [(talk, turn) for turn in range(1, turns + 1) for talk in range(count)]
    names = tuple(tuple(1000 * talk + page for page in range(10 * turn)) for talk, turn in rows)
    lengths = np.array([PAGE * len(each) for each in names])
    return Trace(3.0 * np.arange(len(rows)), lengths, np.full(len(rows), 20), names, PAGE)


def run(
    mesh: str = PAIR,
    work: Trace | None = None,
    rates: dict[Tier, float] = QUICK,
    pool_tokens: int = 0,
    routing: Routing = Routing.LEAST_LOADED,
    fast_forward: bool = True,
    log: SpanLog | None = None,
    **below: Any,
) -> Outcome:
    work = talks() if work is None else work
    shape, chip, spec = Model(model_of("llama3-70b")), hardware("a800"), MeshSpec.parse(mesh)
    sizes = plain_settings(longest(work), max_num_seqs=256, page_size=PAGE, prefix_caching="on")
    in_hbm = cluster_spec(spec, sizes, with_room(by_roofline(lambda tp: Roofline(shape, chip, tp)), HBM_TOKENS), 87e9)
    tiers = TierSpec(tier_speeds(spec, devices_of("a800"), rates), pool_tokens)
    cluster = simulated(
        with_tiers(in_hbm, tiers, **below), router=replace(PATIENT, routing=routing), fast_forward=fast_forward, log=log
    )
    outcome = cluster.run(work)
    cluster.check_all_ended()
    for each in cluster.workers.values():
        each.check_invariants()
    return outcome


@cache
def alone() -> Outcome:
    return run()


@cache
def with_dram() -> Outcome:
    return run(dram_tokens=5_000_000)


def test_what_left_hbm_comes_back_from_dram_and_first_tokens_come_earlier():
    assert not alone().moved
    assert with_dram().moved[Tier.DRAM, Tier.HBM].pages > 0
    assert hit_rate(with_dram()) > 1.5 * hit_rate(alone())
    assert with_dram().values("TTFT").mean() < alone().values("TTFT").mean()


def test_a_move_takes_its_bytes_at_the_tiers_bandwidth_and_ways_are_taken_in_turn():
    name = WorkerId("prefill-0")
    spec = TierSpec({name: {tier: TierRate(1e9, 0.5) for tier in Tier}})
    tiers = SimulatedTiers(spec, (worker("prefill-0", Role.PREFILL, page_size=100),), {name: 1e6})

    def move(source: Tier, destination: Tier, now_s: float, ready_s: float) -> float:
        names, owner = packed([1, 2]), Attempt(RequestId("m"), 1)
        return tiers.begin(name, PageMove(owner, source, destination, names), now_s, ready_s)[0]

    assert move(Tier.HBM, Tier.DRAM, 1.0, 2.0) == pytest.approx(2.0 + 0.5 + 0.2)  # packed when the devices are free
    assert move(Tier.HBM, Tier.DRAM, 1.0, 1.0) == pytest.approx(2.7 + 0.7)  # behind the first
    assert move(Tier.DRAM, Tier.HBM, 1.0, 9.0) == pytest.approx(1.7)  # the other way
    assert move(Tier.DRAM, Tier.DISK, 1.0, 9.0) == pytest.approx(1.7)  # another tier
    told = tiers.moved[Tier.HBM, Tier.DRAM]
    assert (told.moves, told.pages, told.tokens, told.num_bytes) == (2, 4, 400, 4e8)


def test_a_tier_that_is_slower_than_computing_is_left_alone_once_that_is_known():
    slow = run(rates={**QUICK, Tier.DRAM: 1e8}, dram_tokens=5_000_000)
    assert slow.moved[Tier.DRAM, Tier.HBM].pages < with_dram().moved[Tier.DRAM, Tier.HBM].pages / 4


def test_what_one_worker_computed_another_reads_from_the_pool():
    mesh, work = "prefill:2xtp8,decode:tp8", talks(7)
    apart = run(mesh, work, routing=Routing.ROUND_ROBIN, dram_tokens=5_000_000)
    shared = run(mesh, work, routing=Routing.ROUND_ROBIN, dram_tokens=5_000_000, pool_tokens=5_000_000)
    assert shared.moved[Tier.POOL, Tier.HBM].tokens > 0
    assert hit_rate(shared) > hit_rate(apart)


def test_what_one_worker_computed_another_borrows_without_a_pool():
    mesh, work = "prefill:2xtp8,decode:tp8", talks(7)
    apart, lending = (
        run(mesh, work, routing=Routing.ROUND_ROBIN, dram_tokens=5_000_000, peer_fetch=each) for each in (False, True)
    )
    moved = lending.moved[Tier.PEER, Tier.HBM]
    assert moved.pages > 0 and moved.seconds > 0
    assert hit_rate(lending) > hit_rate(apart)


def test_a_log_knows_at_every_moment_where_kv_lies_and_what_came_back():
    log = SpanLog()
    outcome = run("prefill:2xtp8,decode:tp8", talks(7), dram_tokens=80_000, pool_tokens=200_000, log=log)
    for (name, place), curve in log.lies.items():
        times = [at_s for at_s, _ in curve]
        assert times == sorted(times) and all(tokens >= 0 for _, tokens in curve), (name, place)
        room = {KVLocation.POOL: 200_000, KVLocation.DRAM: 80_000 + PAGE}.get(place, HBM_TOKENS)
        assert max(tokens for _, tokens in curve) <= room
    came = {tier: sum(tokens for _, source, tokens in log.came if source is tier) for tier in (Tier.DRAM, Tier.POOL)}
    assert came == {tier: outcome.moved[tier, Tier.HBM].tokens for tier in came}


def test_disk_holds_what_dram_has_no_room_for():
    outcome = run(dram_tokens=80_000, disk_tokens=5_000_000)
    assert outcome.moved[Tier.DRAM, Tier.DISK].pages and outcome.moved[Tier.DISK, Tier.HBM].pages


@pytest.mark.parametrize("mesh", [PAIR, "colocated:tp8"])
def test_foreseen_steps_end_as_taken_ones_beside_moves(mesh):
    below: dict[str, Any] = {"dram_tokens": 80_000, "disk_tokens": 1_000_000, "pool_tokens": 1_000_000}
    ahead, one_by_one = (run(mesh, talks(8), fast_forward=each, **below) for each in (True, False))
    assert signature(ahead) == signature(one_by_one) and ahead.moved == one_by_one.moved
    assert ahead.events < one_by_one.events


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=40), st.integers(1, 5))
def test_a_pool_keeps_what_was_put_or_read_last(turns, room):
    pool, model = SharedPool(room), OrderedDict[int, None]()
    for now_s, (put, name) in enumerate(turns):
        if put:
            pool.put([name], now_s)
            model[name] = None
            model.move_to_end(name)
            while len(model) > room:
                model.popitem(last=False)
        else:
            assert pool.get(name, now_s) == (name in model)
            if name in model:
                model.move_to_end(name)
    assert list(pool.held) == list(model)


def test_a_page_is_in_the_pool_when_it_has_come_there():
    pool = SharedPool(2)
    pool.put([7], 3.0)
    assert not pool.get(7, 2.9) and pool.get(7, 3.0)


def test_rates_that_are_said_stand_for_the_data_sheets():
    assert rates_said(["dram:25", "pool:1.5"]) == {Tier.DRAM: 25e9, Tier.POOL: 1.5e9}
    speeds = tier_speeds(MeshSpec.parse("colocated:tp4"), devices_of("a800"), {Tier.POOL: 1e9})[WorkerId("colocated-0")]
    assert speeds[Tier.DRAM].bytes_per_s == 4 * hardware("a800").host_bytes_per_s
    assert speeds[Tier.POOL].bytes_per_s == 1e9


@pytest.mark.parametrize("words", ["dram", "hbm:3", "dram:0", "tape:1", "dram:x"])
def test_a_rate_that_is_none_is_refused_with_what_there_is(words):
    with pytest.raises(ConfigError, match=f"'{words}' is no TIER:RATE of dram, disk, pool, peer"):
        rates_said([words])


def command(*flags: str) -> int:
    given = (f"--trace=mooncake:{EXCERPT}", f"--mesh={PAIR}", "--model=llama3-70b", "--page_size=512", "--requests=40")
    return main(["sim", *given, "--rate=0.3", "--kv_tokens=150000", *flags])


def test_the_command_says_what_moved(tmp_path, capsys):
    told = tmp_path / "run.json"
    assert command("--dram_tokens=3000000", "--pool_tokens=3000000", f"--json={told}") == 0
    moved = json.loads(told.read_text(encoding="utf-8"))["tiers"]
    assert moved["hbm_to_dram"]["pages"] == moved["hbm_to_pool"]["pages"] > 0
    assert f"hbm to dram: {moved['hbm_to_dram']['tokens']:,} tokens" in capsys.readouterr().out


def test_tiers_that_would_find_nothing_are_refused_with_the_reason(tmp_path, capsys):
    assert command("--dram_tokens=1000", "--prefix_caching=off") == 2
    assert "--dram_tokens=1000: nothing is kept" in capsys.readouterr().err
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n500,20\n", encoding="utf-8")
    flags = [f"--trace=lengths:{path}", "--rate=1", "--requests=2", "--pool_tokens=5", "--model=llama3-8b"]
    assert main(["sim", *flags]) == 2
    assert "take a trace that names its blocks" in capsys.readouterr().err


def test_a_ring_keeps_nothing_below_hbm(capsys):
    assert command("--mesh=prefill:tp8,decode:ring2tp4", "--dram_tokens=1000") == 2
    assert "decode-0 is a ring of 2" in capsys.readouterr().err


def test_room_that_is_said_is_what_workers_have(capsys):
    assert command("--kv_tokens=100", "--page_size=512") == 2
    assert "room for 100 tokens" in capsys.readouterr().err
