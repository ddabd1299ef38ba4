"""Steps foreseen and taken at once give what steps one by one give: every request's times, ends, workers and ledger."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.core.steps import DecodeRows
from jdisagg.core.worker_config import TransferMode
from jdisagg.sim.arithmetic import model
from jdisagg.sim.cluster import PATIENT, Cluster
from jdisagg.sim.cluster_spec import FREE_LINK, ClusterSpec, cluster_spec, longest, plain_settings, published
from jdisagg.sim.cost_models import CostModel, Model, Roofline, VectorCostModel, distserve_fit
from jdisagg.sim.hardware import hardware
from jdisagg.sim.outcome import Outcome
from jdisagg.sim.simulation import SpanLog
from jdisagg.sim.traces import Trace

MESHES = ["prefill:tp1,decode:tp1", "prefill:2xtp1,decode:2xpp2tp1", "colocated:2xtp1", "colocated:pp2tp1"]
NS = 1e-9


class OneByOne:
    """A cost model that does not take turns as arrays."""

    def __init__(self, cost: CostModel) -> None:
        self.prefill_s, self.decode_s, self.transfer_bytes = cost.prefill_s, cost.decode_s, cost.transfer_bytes


@st.composite
def worlds(draw: st.DrawFn) -> tuple[ClusterSpec, Trace]:
    """A few requests, some at one instant, on a small cluster whose pools run from tight to easy."""
    count = draw(st.integers(1, 14))
    seed = draw(st.integers(0, 999))
    lots = np.random.default_rng(seed)
    arrival_s = np.sort(lots.exponential(draw(st.sampled_from([0.0, 0.05, 1.0])) * np.ones(count)).cumsum())
    trace = Trace(arrival_s, lots.integers(1, 60, count), lots.integers(1, draw(st.sampled_from([3, 40, 200])), count))
    sizes = plain_settings(
        max_model_len=longest(trace),
        page_size=draw(st.sampled_from([1, 4, 16])),
        max_num_seqs=draw(st.sampled_from([1, 2, 8])),
        max_num_batched_tokens=32,
        steps_in_flight=draw(st.integers(1, 3)),
        reserve_tokens=draw(st.sampled_from([1, 20, 512])),
        transfer=draw(st.sampled_from(TransferMode)),
    )
    mesh, port = MeshSpec.parse(draw(st.sampled_from(MESHES))), draw(st.sampled_from([FREE_LINK, 1e9]))
    steps = draw(st.integers(0, 2))
    given = cluster_spec(mesh, sizes, published("opt-13b"), port, decode_steps_per_chunk=steps)
    pages = max(config.pages_for(longest(trace)) for config in given.workers) + draw(st.sampled_from([2, 20, 1000]))
    costs = {name: OneByOne(cost) for name, cost in given.costs.items()} if draw(st.booleans()) else given.costs
    workers = tuple(
        replace(config, num_pages=pages, table_buckets=tuple(sorted({2, 8, *config.table_buckets})))
        for config in given.workers
    )
    return replace(given, workers=workers, costs=costs), trace


def told(given: ClusterSpec, trace: Trace, *, fast_forward: bool, **kinds) -> tuple[Outcome, SpanLog]:
    log = SpanLog()
    hosted = Cluster(given.workers, given.costs, given.links, log=log, fast_forward=fast_forward, **kinds)
    outcome = hosted.run(trace)
    hosted.check_all_ended()
    return outcome, log


def same(one: Outcome, other: Outcome) -> None:
    for a, b in zip(one.records, other.records, strict=True):
        assert (a.request_id, a.reason, a.detail, a.emitted_tokens) == (
            b.request_id,
            b.reason,
            b.detail,
            b.emitted_tokens,
        )
        assert (a.prefill_worker, a.decode_worker) == (b.prefill_worker, b.decode_worker)
        assert [a.first_s, a.last_s, a.end_s] == pytest.approx([b.first_s, b.last_s, b.end_s], abs=NS, rel=0)
        marks = [[] if each.ledger is None else each.ledger.marks for each in (a, b)]
        assert [mark for mark, _ in marks[0]] == [mark for mark, _ in marks[1]]
        assert [at_ns for _, at_ns in marks[0]] == pytest.approx([at_ns for _, at_ns in marks[1]], abs=1)
    assert one.busy == pytest.approx(other.busy, abs=NS)


@given(worlds(), st.sampled_from([0.0, 50e-6]))
@settings(max_examples=60, deadline=None)
def test_steps_taken_at_once_are_the_same_steps(world, message_s):
    (one, log), (many, other) = (told(*world, fast_forward=each, message_s=message_s) for each in (False, True))
    same(one, many)
    assert many.events <= one.events
    for worker, curve in log.pages.items():
        assert [pages for _, pages in curve] == [pages for _, pages in other.pages[worker]]
        assert [at_s for at_s, _ in curve] == pytest.approx([at_s for at_s, _ in other.pages[worker]], abs=NS)


@given(worlds(), st.sampled_from([0.05, 0.3, 1.0]))
@settings(max_examples=20, deadline=None)
def test_deadlines_find_late_what_would_be_late_step_by_step(world, stall_s):
    """A token that is not told yet, only because its turn was not taken alone, is not late."""
    router = replace(PATIENT, stall_timeout_s=stall_s, handoff_timeout_s=2 * stall_s, lease_s=2 * stall_s)
    one, many = (told(*world, fast_forward=each, router=router)[0] for each in (False, True))
    same(one, many)


def lone(mesh: str, outputs: int, **sizes) -> tuple[ClusterSpec, Trace]:
    trace = Trace(np.zeros(1), np.array([100]), np.array([outputs]))
    fields = {name: sizes.pop(name) for name in ("chunks_in_flight", "decode_steps_per_chunk") if name in sizes}
    settings = plain_settings(longest(trace), **sizes)
    return cluster_spec(MeshSpec.parse(mesh), settings, published("opt-13b"), FREE_LINK, **fields), trace


@pytest.mark.parametrize("mesh", MESHES)
def test_an_output_of_any_length_takes_as_many_events(mesh):
    """Whose pages are all reserved; step by step, two events a token."""
    events = [told(*lone(mesh, outputs, reserve_tokens=9999), fast_forward=True)[0].events for outputs in (60, 1500)]
    assert events[1] < events[0] + 6 < 40, "timers may cut what was foreseen, tokens may not"
    assert told(*lone(mesh, 1500), fast_forward=False)[0].events > 2900


def test_what_is_seen_in_the_midst_of_foreseen_steps_is_what_has_ended_by_then():
    given, trace = lone(MESHES[0], 500)
    hosted = [Cluster(given.workers, given.costs, fast_forward=each) for each in (False, True)]
    one, many = (each.run(trace, until_s=5.0) for each in hosted)
    same(one, many)
    assert 100 < one.records[0].emitted_tokens < 400


@pytest.mark.parametrize(
    "cost", [distserve_fit("opt-13b", 1), Roofline(Model(model("llama3-70b")), hardware("h100"), 8)]
)
def test_many_steps_cost_what_each_of_them_costs(cost):
    plan, contexts = DecodeRows(0, (0, 3, 4), 8), np.arange(5, 300_000, 777)
    assert isinstance(cost, VectorCostModel)
    assert cost.steps_s(plan, contexts).tolist() == [cost.decode_s(plan, each) for each in contexts.tolist()]


CASES = {
    "a step begins amid foreseen ones, as many as before are quiet after it": (
        Trace(np.zeros(5), np.array([26, 40, 45, 20, 40]), np.array([136, 90, 25, 123, 11])),
        plain_settings(
            162,
            page_size=4,
            max_num_seqs=1,
            max_num_batched_tokens=32,
            steps_in_flight=1,
            reserve_tokens=20,
            transfer=TransferMode.WHOLE,
        ),
        43,
    ),
    "one gives up its slot when nobody looks for one": (
        Trace(
            np.array([0.0339966, 0.08497645, 0.08596678, 0.08608025, 0.11359739, 0.19509442, 0.22877356, 0.26653863]),
            np.array([38, 33, 34, 56, 17, 49, 40, 1]),
            np.array([79, 171, 111, 7, 153, 146, 169, 35]),
        ),
        plain_settings(
            209, page_size=16, max_num_seqs=1, max_num_batched_tokens=32, steps_in_flight=1, reserve_tokens=1
        ),
        16,
    ),
}  # found by the test above


@pytest.mark.parametrize(("trace", "sizes", "pages"), CASES.values(), ids=CASES.keys())
def test_what_was_once_foreseen_wrongly(trace, sizes, pages):
    given = cluster_spec(MeshSpec.parse(MESHES[1]), sizes, published("opt-13b"), 1e9, decode_steps_per_chunk=0)
    given = replace(
        given, workers=tuple(replace(each, num_pages=pages, table_buckets=(2, 8, 41)) for each in given.workers)
    )
    one, many = (told(given, trace, fast_forward=each, message_s=0.0)[0] for each in (False, True))
    same(one, many)
