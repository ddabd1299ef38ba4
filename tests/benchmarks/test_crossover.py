"""Medians, the place where two curves cross, and the words that say why: what crossover makes of its bursts."""

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.image import imread

from benchmarks import crossover, crossover_figures, crossover_plot, crossover_sim
from benchmarks.crossover import BURSTY, Asked, Found, ask_all, explained, num_jobs, table
from benchmarks.crossover_figures import (
    ARCHITECTURES,
    DISAGGREGATED,
    REPLICATED,
    SINGLE,
    Cell,
    Middle,
    Turn,
    crossing_text,
    crossings,
    lead,
    objectives,
    stalled_share,
    why,
)
from benchmarks.crossover_stacks import PLANS, Plan, commands, names_of
from benchmarks.figures import SLO
from benchmarks.load import Burst, Sample
from benchmarks.workload import Job, Lengths, Workload
from jdisagg.core.ledger import PARTS
from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.core.profile import Profile
from jdisagg.sim.cluster_spec import ClusterSpec, cluster_spec, plain_settings, published
from tests.sim.profiles import profile

LOOSE = SLO(1e9, 1e9)


def sample(ttft_s: float = 0.1, gaps_s: tuple[float, ...] = (0.01, 0.01), error: str = "", **parts_ms: float) -> Sample:
    times = [ttft_s]
    for gap in gaps_s:
        times.append(times[-1] + gap)
    ledger = {part: int(parts_ms.get(part, 0.0) * 1e6) for part in PARTS}
    return Sample(0.0, tuple(times), times[-1], 8, len(times), ledger, error)


def burst(*samples: Sample, wall_s: float = 1.0) -> Burst:
    return Burst(len(samples), wall_s, samples)


def around(mid: float, spread: float = 0.01) -> Middle:
    return Middle(mid, mid * (1 - spread), mid * (1 + spread))


def cell(
    architecture: str, streams: int, tokens_per_s: float, busy: dict[str, float] | None = None, **parts_ms
) -> Cell:
    same = around(10.0)
    ledger = dict.fromkeys(PARTS, 0.0) | parts_ms
    return Cell(architecture, "balanced", streams, 3, 0, around(tokens_per_s), same, same, same, same, same,
                Middle(0.2, 0.1, 0.3), ledger, busy or {})  # fmt: skip


def test_a_cell_is_the_median_of_rounds_with_their_range_and_failures_count_as_asked():
    turns = [
        Turn(burst(sample(0.1), sample(0.3), wall_s=1.0), {"prefill": 0.2}),
        Turn(burst(sample(0.2), sample(error="broken"), wall_s=1.0), {"prefill": 0.6}),
        Turn(burst(sample(0.4), wall_s=2.0), {"prefill": 0.4}),
    ]
    found = crossover_figures.cell(("balanced", SINGLE, 2), turns, SLO(250, 20), 0.01)
    assert found.tokens_per_s == Middle(3.0, 1.5, 6.0)
    assert found.ttft_ms.mid == pytest.approx(200) and found.ttft_ms.high == pytest.approx(400)
    assert (found.failed, found.good_share, found.busy) == (1, Middle(0.5, 0.0, 0.5), {"prefill": 0.4})
    assert found.good_per_s == Middle(1.0, 0.0, 1.0)


def test_objectives_are_multiples_of_an_idle_device():
    found = objectives([burst(sample(0.1), sample(0.3), sample(0.2))], (6, 2))
    assert (found.ttft_ms, found.tpot_ms) == pytest.approx((1200, 20))
    with pytest.raises(ValueError, match="no answer"):
        objectives([burst(sample(error="broken"))], (6, 2))


def test_only_gaps_of_more_than_two_idle_turns_are_stalls():
    assert stalled_share([sample(gaps_s=(9.0, 0.01, 0.019, 0.01))], 0.01) == 0, "the first gap is the handoff's"
    assert stalled_share([sample(gaps_s=(0.01, 0.01, 0.05, 0.04))], 0.01) == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [(100, 50, 1), (50, 100, -1), (100, 101, 0), (100, 104, 0)],
    ids=["ahead", "behind", "within the spread", "alike"],
)
def test_who_leads_is_said_only_beyond_the_spread(ours, theirs, expected):
    assert lead(around(ours), around(theirs), rising=True) == expected
    assert lead(around(ours), around(theirs), rising=False) == -expected


def test_curves_cross_where_their_ratio_is_one_along_the_logarithm_of_streams():
    ours, theirs = [around(each) for each in (50, 50, 200)], [around(each) for each in (100, 100, 100)]
    (found,) = crossings((1, 4, 16), ours, theirs, rising=True)
    assert found.ahead and found.streams == pytest.approx(8.0)
    assert crossings((1, 4, 16), theirs, ours, rising=True)[0].ahead is False


def test_a_level_at_which_neither_leads_is_passed_over():
    ours, theirs = [around(each) for each in (50, 100, 200)], [around(100)] * 3
    (found,) = crossings((1, 4, 16), ours, theirs, rising=True)
    assert found.streams == pytest.approx(4.0)
    assert crossings((1, 4, 16), [around(100)] * 3, theirs, rising=True) == []


def test_goodput_that_falls_to_nothing_crosses_as_well():
    good, bad = [around(2), around(0)], [around(1), around(1)]
    (found,) = crossings((1, 16), good, bad, rising=True)
    assert not found.ahead and found.streams == pytest.approx(2.0)


def curve(architecture: str, *rates: float) -> list[Cell]:
    return [cell(architecture, streams, rate) for streams, rate in zip((1, 4, 16), rates, strict=True)]


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        ((50, 50, 200), "tokens/s: crosses: disaggregated from about 8 streams on (-50 % at 1, +100 % at 16 streams)"),
        ((50, 60, 70), "tokens/s: does not cross: replicated better at every level"),
        ((100, 100, 150), "tokens/s: does not cross: disaggregated better at 16 (+0 % at 1"),
        ((100, 100, 100), "tokens/s: no difference beyond the spread"),
    ],
    ids=["cross", "never", "even at first", "even"],
)
def test_the_line_says_whether_curves_cross(ours, words):
    found = crossing_text("tokens_per_s", (1, 4, 16), curve(DISAGGREGATED, *ours), curve(REPLICATED, 100, 100, 100))
    assert found.startswith(words)


def test_why_tells_the_ledgers_differences_from_the_largest_down_and_leaves_small_ones_out():
    ours = cell(DISAGGREGATED, 16, 80, {"prefill": 0.98, "decode": 0.4}, queue=400, prefill=100, transfer=9, decode=300)
    theirs = cell(REPLICATED, 16, 100, {"colocated 1": 0.9, "colocated 2": 0.9}, queue=100, prefill=102, decode=500)
    lines = why(ours, theirs)
    assert "takes 809 ms, of replicated 702 ms (+107)" in lines[0]
    assert "waits longer for a prefill to begin: +300 ms" in lines[1]
    assert "decodes faster: -200 ms" in lines[2]
    assert len(lines) == 5, "9 ms of transfer and 2 of prefill are not worth a line"
    assert "prefill 98%, decode 40%; replicated colocated 1 90%" in lines[-1]


def test_a_server_that_tells_no_ledger_explains_nothing():
    assert why(cell(DISAGGREGATED, 1, 1), cell(REPLICATED, 1, 1)) == ["no ledger to explain it by"]


def test_the_bursty_workload_waits_for_all_answers_before_it_asks_again():
    running, most, starts = 0, 0, []

    async def ask(job: Job) -> Sample:
        nonlocal running, most
        running += 1
        most = max(most, running)
        starts.append((job.max_tokens, running))
        await asyncio.sleep(0.001 * job.max_tokens)
        running -= 1
        return sample()

    jobs = [Job((1,), number) for number in range(1, 7)]
    found = asyncio.run(ask_all(BURSTY, jobs, 3, ask))
    assert most == 3 and [order for _, order in starts] == [1, 2, 3, 1, 2, 3]
    assert len(found.samples) == 6 and found.concurrency == 3


def test_every_architecture_is_asked_the_same_and_each_round_something_new():
    asked = Asked({"balanced": Workload(Lengths(8, 16), Lengths(4, 8), 1000)}, (1, 4), 2)
    assert asked.jobs("balanced", 4, 0) == asked.jobs("balanced", 4, 0) != asked.jobs("balanced", 4, 1)
    assert len(asked.jobs("balanced", 4, 0)) == num_jobs("balanced", 4) == 6 and asked.longest == 24
    assert not any(num_jobs(BURSTY, streams) % streams for streams in range(1, 33)), "whole gangs"


def test_hardware_is_equal_a_core_for_each_worker_and_slots_for_all_streams():
    for plan in PLANS:
        router, *workers = commands(plan, (3, 5), (), plan.slots(32), Path("secret"))
        assert [command.argv[:3] for command in workers] == [("taskset", "-c", str(c)) for c in (3, 5)][: len(workers)]
        assert "taskset" not in router.argv
        decoders = [roles for roles in plan.workers if "decode" in roles]
        assert plan.slots(32) * len(decoders) == 32 and plan.slots(1) == 1
        assert len(set(names_of(plan))) == len(plan.workers)
        assert MeshSpec.parse(plan.mesh).num_devices == len(set(plan.workers)), "each process makes its own workers"


def test_tables_words_and_a_picture_come_of_found_bursts(tmp_path):
    asked, found = Asked({"balanced": Workload(Lengths(8, 16), Lengths(4, 8), 1000)}, (1, 4), 2), Found()
    for architecture in ARCHITECTURES:
        for streams in asked.levels:
            ones = [sample(0.1 * streams, queue=1, prefill=90, decode=20) for _ in range(streams)]
            found.turns[("balanced", architecture, streams)] = [Turn(burst(*ones), {"colocated 1": 0.5})] * 2
    slos = found.objectives(asked, (6, 2))
    cells = found.cells(asked, slos)
    assert len(cells) == 6 and table("balanced", cells, slos["balanced"]).row_count == 6
    words = "\n".join(explained("balanced", cells))
    assert "no difference beyond the spread" in words and "one stream: 111.0 ms on single" in words
    crossover_plot.plot(str(tmp_path / "x.png"), cells, "a note", {"balanced": "8:16 in"}, cells)
    assert imread(tmp_path / "x.png").shape[0] > 500
    assert not math.isnan(cells[0].itl_p99_ms.mid) and crossover.report_of(asked, slos, cells)["cells"]


def test_the_simulation_answers_the_same_jobs_by_any_cost_model_and_stands_beside_the_live_run():
    drawn = Workload(Lengths(64, 128), Lengths(8, 16), 1000)
    asked = Asked({"balanced": drawn, BURSTY: drawn}, (1, 4), 1)
    jobs = {(workload, streams): asked.jobs(workload, streams, 0) for workload, streams in asked.cells()}

    def fleet_of_plan(plan: Plan) -> ClusterSpec:
        return cluster_spec(
            MeshSpec.parse(plan.simulated), plain_settings(256, max_num_seqs=plan.slots(4)), published("opt-13b"), 1e9
        )

    slos = dict.fromkeys(asked.workloads, SLO(500, 40))
    cells = crossover_sim.foreseen(PLANS, jobs, BURSTY, fleet_of_plan, slos)
    assert len(cells) == 2 * 2 * 3 and not any(each.failed for each in cells)
    by_key = {(each.workload, each.architecture, each.streams): each for each in cells}
    alone, apart = by_key["balanced", SINGLE, 1], by_key["balanced", DISAGGREGATED, 1]
    assert apart.ledger_ms["transfer"] > alone.ledger_ms["transfer"] == 0
    assert by_key["balanced", REPLICATED, 4].tokens_per_s.mid > by_key["balanced", SINGLE, 4].tokens_per_s.mid
    assert by_key["balanced", SINGLE, 4].itl_p99_ms.mid > 2 * alone.itl_p99_ms.mid, "a prefill stands between tokens"
    assert list(by_key[BURSTY, REPLICATED, 4].busy) == ["colocated-0", "colocated-1"]
    assert crossover_sim.error([(alone, alone), (alone, apart)], "tpot_ms") == pytest.approx(
        abs(apart.tpot_ms.mid / alone.tpot_ms.mid - 1) / 2
    )
    assert "in 20 of 20" in crossover_sim.same_winners(cells, cells)
    assert crossover_sim.beside("balanced", cells, cells).row_count == 7


def test_each_architecture_is_foretold_by_the_profile_with_its_number_of_slots():
    def profiled(slots: int) -> Profile:
        made = profile()
        pools = tuple(replace(pool, config=replace(pool.config, num_slots=slots)) for pool in made.pools)
        return replace(made, pools=pools, slowdown={"decode": {"decode": 1.0}})

    fleet_of_plan = crossover_sim.by_profiles([profiled(16), profiled(32)], 32)
    fleets = {plan.name: fleet_of_plan(plan) for plan in PLANS}
    assert [fleets[name].workers[-1].num_slots for name in ARCHITECTURES] == [32, 16, 32]
    assert not any(each.slowdown for each in fleets.values()), "every worker has a core of its own"
