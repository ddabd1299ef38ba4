"""Rates and concurrency of clients, in virtual time."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jdisagg.policy.client_limits import ClientLimits, LimitProblem, Rates


def test_a_minutes_requests_may_come_at_once_and_the_next_one_when_its_share_of_the_minute_has_passed():
    limits = ClientLimits(Rates(requests_per_minute=6))
    assert [limits.admit("ann", 1, 0.0) for _ in range(6)] == [None] * 6
    assert limits.admit("ann", 1, 0.0) == LimitProblem("requests_per_minute", 6, 10.0)
    assert limits.admit("ann", 1, 9.0) == LimitProblem("requests_per_minute", 6, 1.0)
    assert limits.admit("ann", 1, 10.0) is None


def test_clients_do_not_share_an_allowance():
    limits = ClientLimits(Rates(requests_per_minute=1, concurrent_requests=1))
    assert limits.admit("ann", 1, 0.0) is None and limits.admit("bob", 1, 0.0) is None
    assert limits.admit("ann", 1, 0.0) is not None


def test_tokens_that_an_answer_did_not_need_are_given_back():
    limits = ClientLimits(Rates(tokens_per_minute=100))
    assert limits.admit("ann", 80, 0.0) is None
    assert limits.admit("ann", 80, 0.0) == LimitProblem("tokens_per_minute", 100, 36.0)
    limits.settle("ann", 80, 20, 0.0)
    assert limits.admit("ann", 80, 0.0) is None


def test_a_request_over_a_whole_minutes_tokens_is_taken_when_all_are_there_and_leaves_a_debt():
    limits = ClientLimits(Rates(tokens_per_minute=60))
    assert limits.admit("ann", 1, 0.0) is None
    assert limits.admit("ann", 120, 0.0) == LimitProblem("tokens_per_minute", 60, 1.0)
    assert limits.admit("ann", 120, 1.0) is None
    assert limits.admit("ann", 1, 1.0) == LimitProblem("tokens_per_minute", 60, 61.0)


def test_a_refused_request_costs_nothing():
    limits = ClientLimits(Rates(requests_per_minute=2, tokens_per_minute=10))
    assert limits.admit("ann", 10, 0.0) is None
    assert isinstance(limits.admit("ann", 10, 0.0), LimitProblem)
    assert [each.remaining for each in limits.allowances("ann", 0.0)] == [1, 0]


def test_requests_at_once_are_counted_until_they_end():
    limits = ClientLimits(Rates(concurrent_requests=2))
    assert [limits.admit("ann", 5, 0.0) for _ in range(3)] == [None, None, LimitProblem("concurrent_requests", 2, 1.0)]
    limits.settle("ann", 5, 5, 0.0)
    assert limits.admit("ann", 5, 0.0) is None


def test_allowances_tell_what_is_left_and_when_all_is_there_again():
    limits = ClientLimits(Rates(requests_per_minute=60, tokens_per_minute=600))
    limits.admit("ann", 300, 0.0)
    requests, tokens = limits.allowances("ann", 10.0)
    assert (requests.name, requests.limit, requests.remaining, requests.reset_s) == ("requests", 60, 60, 0.0)
    assert (tokens.limit, tokens.remaining, tokens.reset_s) == (600, 400, 20.0)


def test_no_more_clients_are_remembered_than_may_be_and_those_that_run_something_never_forgotten():
    limits = ClientLimits(Rates(requests_per_minute=2, concurrent_requests=1), most_clients=3)
    limits.admit("ann", 1, 0.0)
    for number in range(50):
        limits.admit(f"stranger-{number}", 1, 0.0)
        limits.settle(f"stranger-{number}", 1, 1, 0.0)
        assert len(limits._clients) <= 3
    assert limits.admit("ann", 1, 0.0) == LimitProblem("concurrent_requests", 1, 1.0)


def test_a_flood_of_addresses_has_the_book_looked_through_once_for_many_of_them():
    limits, looked = ClientLimits(Rates(requests_per_minute=2), most_clients=100), 0
    for number in range(1000):
        before = len(limits._clients)
        limits.admit(f"stranger-{number}", 1, 0.0)
        limits.settle(f"stranger-{number}", 1, 1, 0.0)
        looked += len(limits._clients) <= before
        assert len(limits._clients) <= 100
    assert 0 < looked <= 1000 / 10


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 40)), max_size=60))
def test_no_more_tokens_are_admitted_in_any_minute_than_twice_the_allowance_and_one_request(asks: list):
    """A full bucket, and what fills it meanwhile; a request over the rest of it only where it is larger than all."""
    limits, now_s, taken = ClientLimits(Rates(tokens_per_minute=50)), 0.0, []
    for gap_s, tokens in asks:
        now_s += gap_s
        if limits.admit("ann", tokens, now_s) is None:
            taken.append((now_s, tokens))
    for start_s, _ in taken:
        assert sum(tokens for at_s, tokens in taken if start_s <= at_s < start_s + 60) <= 100 + 1e-6


class LimitsMachine(RuleBasedStateMachine):
    """Requests of three clients that are admitted and end in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = ClientLimits(Rates(30, 500, 3), most_clients=2)
        self.now_s, self.running = 0.0, []

    @rule(name=st.sampled_from(["ann", "bob", "cy"]), tokens=st.integers(0, 800))
    def ask(self, name: str, tokens: int) -> None:
        if self.limits.admit(name, tokens, self.now_s) is None:
            self.running.append((name, tokens))

    @rule(at=st.integers(0, 10), used=st.integers(0, 900))
    def end(self, at: int, used: int) -> None:
        if self.running:
            name, tokens = self.running.pop(at % len(self.running))
            self.limits.settle(name, tokens, used, self.now_s)

    @rule(seconds=st.floats(-1, 100))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def no_client_runs_too_many_or_is_owed_more_than_a_minute(self) -> None:
        names = [name for name, _ in self.running]
        for name in set(names):
            assert names.count(name) <= 3
            for each in self.limits.allowances(name, self.now_s):
                assert 0 <= each.remaining <= each.limit and each.reset_s >= 0


TestLimitsMachine = LimitsMachine.TestCase
