"""Either side of a worker under random orders of all that can happen to it. Pages are counted after each event."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from jdisagg.core.events import DropKV, InsertKV
from jdisagg.core.messages import Commit, Drawn, Ended, Preempted
from jdisagg.core.request import Request, RequestId, SamplingParams
from jdisagg.core.worker_config import Role, Stages, TransferMode
from tests.policy.bench import Bench
from tests.sim.cases import definition, worker

prompts = st.lists(st.integers(0, 96), min_size=1, max_size=9).map(tuple)
samplings = st.builds(
    SamplingParams,
    max_tokens=st.integers(2, 9),
    stop_token_ids=st.lists(st.integers(0, 96), max_size=16, unique=True).map(tuple),
)


def parts_of(each: Request) -> int:
    """Into how many parts the test cuts this prompt's KV."""
    return 1 + len(each.prompt) % 3


class SideMachine(RuleBasedStateMachine):
    """What both sides share: requests by name, and results read when chance says so."""

    role: Role

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, Request] = {}
        self.alive: set[str] = set()

    @initialize(
        pages=st.integers(9, 20),
        slots=st.integers(1, 2),
        microbatches=st.integers(1, 2),
        ahead=st.integers(1, 3),
        reserve=st.integers(1, 9),
        mode=st.sampled_from(TransferMode),
        groups=st.integers(1, 3),
    )
    def begin(
        self, pages: int, slots: int, microbatches: int, ahead: int, reserve: int, mode: TransferMode, groups: int
    ) -> None:
        self.bench = Bench(
            worker(
                "w",
                self.role,
                num_pages=pages,
                page_size=2,
                num_slots=slots * microbatches,
                decode=Stages(microbatches),
                steps_in_flight=ahead,
                chunks_in_flight=ahead,
                reserve_tokens=reserve,
                prefill_buckets=(4,),
                table_buckets=(4, 9),
                max_chunk_seqs=2,
                transfer=mode,
                layer_groups=tuple((2 * n, 2 * n + 2) for n in range(groups)),
            )
        )

    def new_request(self, prompt: tuple[int, ...], sampling: SamplingParams, priority: int) -> Request:
        name = RequestId(f"r{len(self.requests)}")
        each = Request(name, prompt, sampling, arrival_s=float(len(self.requests)), priority=priority)
        self.requests[name] = each
        return each

    def tokens_of(self, name: str) -> list[int]:
        draws = [
            draw for message in self.bench.said(Drawn) for draw in message.deltas if draw.attempt.request_id == name
        ]
        return [sampled.token for draw in draws for sampled in draw.sampled]

    @precondition(lambda self: self.bench.pending)
    @rule()
    def read(self) -> None:
        self.bench.read()

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        self.alive.discard(name)
        self.bench.abort(name)

    @precondition(lambda self: self.bench.timers)
    @rule(data=st.data())
    def fire(self, data: st.DataObject) -> None:
        self.bench.fire(data.draw(st.sampled_from(sorted(self.bench.timers))))

    def check_all_back(self) -> None:
        self.bench.read_all()
        assert self.bench.worker.idle
        assert self.bench.free_pages == self.bench.worker.config.num_pages


class DecodePhaseMachine(SideMachine):
    """The decode side: reservations, commits, arrivals, aborts and results in any order."""

    role = Role.DECODE

    @rule(prompt=prompts, sampling=samplings, priority=st.integers(0, 1))
    def reserve(self, prompt: tuple[int, ...], sampling: SamplingParams, priority: int) -> None:
        each = self.new_request(prompt, sampling, priority)
        if definition(each)[0] not in sampling.stop_token_ids and self.bench.reserve(each):
            self.alive.add(each.request_id)

    @precondition(lambda self: self.bench.epochs)
    @rule(data=st.data(), both=st.booleans())
    def commit(self, data: st.DataObject, both: bool) -> None:
        """Of the living and of the dead, once and again."""
        each = self.requests[data.draw(st.sampled_from(sorted(self.bench.epochs)))]
        self.bench.commit(each, parts_of(each))
        if both:
            self.arrive_all(each)

    def arrive_all(self, each: Request) -> None:
        for part in range(parts_of(each)):
            self.bench.arrive(each, part, parts_of(each))

    @precondition(lambda self: self.bench.epochs)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        each = self.requests[data.draw(st.sampled_from(sorted(self.bench.epochs)))]
        part = data.draw(st.integers(0, parts_of(each) - 1))
        waited = each.request_id in {owner.request_id for owner in self.bench.worker.decode.sequences}
        kinds = {type(effect) for effect in self.bench.arrive(each, part, parts_of(each))}
        assert len(kinds & {InsertKV, DropKV}) == 1
        assert waited or DropKV in kinds

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        for name in sorted(self.alive):
            self.bench.commit(self.requests[name], parts_of(self.requests[name]))
            self.arrive_all(self.requests[name])
        self.check_all_back()
        ended = {message.attempt.request_id: message for message in self.bench.said(Ended)}
        preempted = {message.attempt.request_id: message for message in self.bench.said(Preempted)}
        for name, each in self.requests.items():
            expected, told = definition(each), self.tokens_of(name)
            assert told == expected[1 : 1 + len(told)]
            if name in ended:
                assert told == expected[1:] and ended[RequestId(name)].num_output == len(expected)
            if name in preempted:
                assert list(preempted[RequestId(name)].output) == expected[: 1 + len(told)]
        assert not ended.keys() & preempted.keys()


class PromptsMachine(SideMachine):
    """The prefill side: starts, acknowledgements, aborts and results in any order."""

    role = Role.PREFILL

    @rule(prompt=prompts, sampling=samplings, priority=st.integers(0, 1))
    def start(self, prompt: tuple[int, ...], sampling: SamplingParams, priority: int) -> None:
        each = self.new_request(prompt, sampling, priority)
        self.bench.start(each)
        self.alive.add(each.request_id)

    @precondition(lambda self: self.bench.epochs)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        """Of the shipped, of the living and of the dead."""
        self.bench.ack(data.draw(st.sampled_from(sorted(self.bench.epochs))))

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        while not self.bench.worker.idle:
            self.bench.read_all()
            for name in list(self.bench.shipped):
                self.bench.ack(name)
        self.check_all_back()
        counted = {message.attempt.request_id: message.num_parts for message in self.bench.said(Commit)}
        for name, num_parts in counted.items():
            assert self.bench.joined(name) == self.requests[name].prompt
            assert [shipment.transfer.part for shipment in self.bench.shipped[name]] == list(range(num_parts))
            assert self.tokens_of(name) == definition(self.requests[name])[:1]


TestDecodePhaseMachine = DecodePhaseMachine.TestCase
TestPromptsMachine = PromptsMachine.TestCase
TestDecodePhaseMachine.settings = TestPromptsMachine.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None
)
