"""A whole cluster under random requests, cancels, priorities, losses and faults.

After every event the pages of every worker are counted and no client has a token too many; at the end every page is
back, every request ended once, and every finished output is the definition. Without faults nobody starves.
"""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jdisagg.core.request import FinishReason, Request, RequestId, SamplingParams
from jdisagg.core.router_config import RouterConfig
from jdisagg.core.worker_config import Role, Stages, TransferMode, WorkerConfig
from tests.sim.cases import NATURAL, check_ended, definition, reasons, worker
from tests.sim.fault_injector import Faults
from tests.sim.world import World

LONGEST = 16  # tokens of the longest request; the smallest pool holds just one of them


@st.composite
def clusters(draw: st.DrawFn) -> list[WorkerConfig]:
    """One or two workers of each role, with pools from hopeless to easy."""
    microbatches = draw(st.integers(1, 3))
    sizes = {
        "num_pages": draw(st.sampled_from([8, 9, 12, 20])),
        "page_size": 2,
        "max_model_len": LONGEST,
        "decode": Stages(microbatches),
        "num_slots": microbatches * draw(st.integers(1, 2)),
        "prefill_buckets": draw(st.sampled_from([(4,), (4, 8), (16,)])),
        "table_buckets": (2, 4, 8),
        "max_chunk_seqs": draw(st.integers(1, 3)),
        "steps_in_flight": draw(st.integers(1, 3)),
        "chunks_in_flight": draw(st.integers(1, 2)),
        "reservations_ahead": draw(st.integers(0, 2)),
        "reserve_tokens": draw(st.sampled_from([1, 3, 100])),
        "decode_steps_per_chunk": draw(st.integers(0, 2)),
        "prefix_caching": draw(st.booleans()),
        "dram_pages": draw(st.sampled_from([0, 0, 6, 40])),
        "disk_pages": draw(st.sampled_from([0, 0, 10])),
        "shared_pool": draw(st.booleans()),
        "transfer": draw(st.sampled_from(TransferMode)),
        "layer_groups": tuple((2 * n, 2 * n + 2) for n in range(draw(st.integers(1, 3)))),
    }
    counts = draw(st.sampled_from([{Role.COLOCATED: 1}, {Role.COLOCATED: 2}, {Role.PREFILL: 1, Role.DECODE: 2}]))
    return [worker(f"{role}-{index}", role, **sizes) for role, count in counts.items() for index in range(count)]


@st.composite
def asked(draw: st.DrawFn) -> tuple[tuple[int, ...], SamplingParams, int]:
    """A prompt, its sampling, its priority; some stop early."""
    tokens = draw(st.sampled_from([st.integers(0, 96), st.integers(0, 1)]))  # of two tokens: many begin alike
    prompt = draw(st.lists(tokens, min_size=1, max_size=LONGEST - 1).map(tuple))
    most = draw(st.integers(1, LONGEST - len(prompt)))
    stops = draw(st.lists(st.integers(0, 96), max_size=12, unique=True).map(tuple))
    sampling = SamplingParams(max_tokens=most, min_tokens=draw(st.integers(0, most)), stop_token_ids=stops)
    return prompt, sampling, draw(st.sampled_from([0, 0, 1]))


class WorldMachine(RuleBasedStateMachine):
    @initialize(
        workers=clusters(),
        faulty=st.booleans(),
        seed=st.integers(0, 999),
        jitter_s=st.sampled_from([0.0, 1e-3, 2e-2]),
    )
    def begin(self, workers: list[WorkerConfig], faulty: bool, seed: int, jitter_s: float) -> None:
        faults = Faults(seed=seed, jitter_s=jitter_s)
        if faulty:
            chances = {
                "lose_message": 0.03,
                "double_message": 0.1,
                "lose_transfer": 0.1,
                "fail_transfer": 0.1,
                "flip_bit": 0.1,
            }
            faults = Faults(seed=seed, jitter_s=jitter_s, fail_plan=0.05, **chances)
        self.faulty, self.workers = faulty, workers
        limits = RouterConfig(queue_timeout_s=600.0 if faulty else 0.0, max_retries=4 if faulty else 0)
        self.world = World(workers, limits, faults=faults)
        self.requests: list[Request] = []
        self.cancelled: set[RequestId] = set()
        self.lost = False

    @rule(what=asked())
    def submit(self, what: tuple[tuple[int, ...], SamplingParams, int]) -> None:
        prompt, sampling, priority = what
        name = RequestId(f"r{len(self.requests)}")
        each = Request(name, prompt, sampling, arrival_s=self.world.now_s, priority=priority)
        self.requests.append(each)
        self.world.submit(each, self.world.now_s)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.requests)).request_id
        self.cancelled.add(name)
        self.world.cancel(name, self.world.now_s)

    @precondition(lambda self: self.faulty and not self.lost)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.lost = True
        self.world.lose(data.draw(st.sampled_from(self.workers)).worker, self.world.now_s)

    @precondition(lambda self: self.faulty and not self.lost)
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        """The worker is gone and nobody is told."""
        self.lost = True
        self.world.kill(data.draw(st.sampled_from(self.workers)).worker, self.world.now_s)

    @rule(events=st.integers(1, 30))
    def go_on(self, events: int) -> None:
        for _ in range(events):
            if self.world.waiting:
                self.world.step()

    @invariant()
    def no_client_has_a_wrong_token_or_two_ends(self) -> None:
        for each in getattr(self, "requests", []):
            output = self.world.output(each.request_id)
            assert output == definition(each)[: len(output)]
            assert len(reasons(self.world, each)) <= 1

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.run()
        check_ended(self.world, self.requests)
        for each in self.requests:
            if not self.faulty and each.request_id not in self.cancelled:
                assert reasons(self.world, each)[0] in NATURAL, self.world.finished[each.request_id]
            for finish in self.world.finished.get(each.request_id, []):
                assert sum(finish.ledger.parts_ns().values()) == finish.ledger.total_ns
                assert finish.reason is not FinishReason.ABORT or each.request_id in self.cancelled
        assert all(peer.work_tokens == 0 for peer in self.world.router.peers.values())


TestWorldMachine = WorldMachine.TestCase
TestWorldMachine.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)


@given(clusters(), st.lists(asked(), min_size=4, max_size=10), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_a_burst_on_tiny_pools_ends_naturally_for_everybody(workers, burst, seed):
    world = World(workers, RouterConfig(queue_timeout_s=0.0, max_retries=0), faults=Faults(seed=seed, jitter_s=1e-3))
    requests = [
        Request(RequestId(f"r{index}"), prompt, sampling, arrival_s=index * 1e-4, priority=priority)
        for index, (prompt, sampling, priority) in enumerate(burst)
    ]
    for each in requests:
        world.submit(each, each.arrival_s)
    world.run()
    check_ended(world, requests)
    assert all(reasons(world, each)[0] in NATURAL for each in requests)
