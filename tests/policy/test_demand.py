"""What is predicted of load: from what the router's driver saw, in workers kept busy."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdisagg.core.events import ROUTER, EmitTokens, Finish, Reject, Send, Submit, WorkerJoined, WorkerLost, WorkerStands
from jdisagg.core.ledger import Ledger
from jdisagg.core.messages import StartPrefill, TokenDelta
from jdisagg.core.request import Attempt, FinishReason, RequestId, Sampled, WorkerId
from jdisagg.core.worker_config import Role
from jdisagg.policy.scaling import BUCKET_S, Demand, RoleScaler, Scaling, Trend
from tests.sim.cases import pair, request, worker

P0, D0, P1 = map(WorkerId, ("prefill-0", "decode-0", "prefill-1"))


def serve(seen: Demand | RoleScaler, name: str, at_s: float, prompt: int = 20, output: int = 10) -> None:
    """A request of 2 s prefill and 4 s decode, from `at_s` on."""
    asked = request(name, prompt, max_tokens=output)
    attempt = Attempt(asked.request_id, 1)
    seen.observe(ROUTER, Submit(asked), at_s)
    seen.observe(ROUTER, Send(P0, StartPrefill(attempt, asked, 0, D0, (), 1.0, 1.0)), at_s)
    seen.observe(ROUTER, EmitTokens(TokenDelta(attempt, 0, (Sampled(1),)), P0), at_s + 2)
    seen.observe(ROUTER, EmitTokens(TokenDelta(attempt, 1, (Sampled(1),) * (output - 1)), D0), at_s + 5)
    seen.observe(ROUTER, Finish(asked.request_id, FinishReason.LENGTH, Ledger()), at_s + 6)


def test_nothing_is_predicted_before_something_was_measured():
    assert Demand(pair()).load(0.0, 10.0) is None


def test_a_steady_load_is_predicted_to_be_what_it_is():
    seen = Demand(pair())
    for step in range(60):
        serve(seen, f"r{step}", 10.0 * step)
    load, decode_s = seen.load(600.0, 10.0), seen.decode_s.value
    assert load is not None and decode_s is not None
    assert load.prefill == pytest.approx(0.2, rel=0.05)  # 2 s of each 10
    assert decode_s == pytest.approx(4 * max(1 / pair()[1].num_slots, 8 / pair()[1].num_pages), rel=0.5)
    assert load.decode == pytest.approx(decode_s / 10.0, rel=0.05)


def test_what_waits_is_load_as_well():
    seen = Demand(pair())
    serve(seen, "first", 0.0)
    before = seen.load(10.0, 10.0)
    for number in range(30):
        seen.observe(ROUTER, Submit(request(f"w{number}", 20, max_tokens=10)), 10.0)
    after = seen.load(10.1, 10.0)
    assert before is not None and after is not None
    assert after.prefill > before.prefill + 0.9 and after.decode > before.decode


def test_prompts_that_are_prefilled_together_are_not_counted_twice():
    seen, asked = Demand(pair()), [request(f"r{number}", 20, max_tokens=2) for number in range(4)]
    for each in asked:
        seen.observe(ROUTER, Submit(each), 0.0)
        seen.observe(ROUTER, Send(P0, StartPrefill(Attempt(each.request_id, 1), each, 0, D0, (), 1.0, 1.0)), 0.0)
    for each in asked:
        seen.observe(ROUTER, EmitTokens(TokenDelta(Attempt(each.request_id, 1), 0, (Sampled(1),)), P0), 2.0)
    assert seen.prompt_s.value == pytest.approx(2.0 / 80, rel=0.1)


def test_who_was_refused_or_lost_is_no_load_and_no_memory_is_kept():
    seen = Demand(pair())
    serve(seen, "first", 0.0)
    for number in range(5):
        seen.observe(ROUTER, Submit(request(f"r{number}", 20, max_tokens=2)), 7.0)
        seen.observe(ROUTER, Reject(RequestId(f"r{number}"), 1.0, "full"), 7.0)
    assert not seen._rows and not seen.work()
    seen.observe(ROUTER, WorkerLost(P0), 8.0)
    assert P0 not in seen.configs


def test_words_to_other_actors_are_not_the_routers():
    seen = Demand(pair())
    seen.observe(P0, Submit(request("r", 20)), 0.0)
    assert not seen._rows


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 500), st.floats(0, 1e5)), max_size=30), st.floats(0, 600))
def test_a_trend_is_never_below_nothing_and_never_wild(steps, ahead_s):
    trend, now_s = Trend(), 0.0
    for gap_s, amount in steps:
        now_s += gap_s
        trend.add(amount, now_s)
    found = trend.ahead(now_s, ahead_s)
    most = sum(amount for _, amount in steps) / BUCKET_S
    assert 0 <= found <= 3 * most + 1e-6


def test_a_rising_rate_is_predicted_to_rise_and_silence_to_end():
    trend = Trend()
    for step in range(40):
        trend.add(step * BUCKET_S, step * BUCKET_S)
    assert trend.ahead(40 * BUCKET_S, 60.0) > trend.ahead(40 * BUCKET_S, 0.0) >= trend.level * 0.9
    assert trend.ahead(40 * BUCKET_S + 3600.0, 0.0) < 1.0


# ---------------------------------------------------------------------- with the autoscaler


def pressed() -> RoleScaler:
    """Two prefill workers and three of decode, and prompts as fast as three could take."""
    workers = [worker(WorkerId(f"prefill-{each}"), Role.PREFILL) for each in range(2)]
    workers += [worker(WorkerId(f"decode-{each}"), Role.DECODE) for each in range(3)]
    scaler = RoleScaler(Scaling(price_s=1.0, steady_s=0.0, rest_s=10.0), workers)
    for step in range(60):
        serve(scaler, f"r{step}", 6.0 * step)
    for number in range(60):
        scaler.observe(ROUTER, Submit(request(f"w{number}", 20, max_tokens=1)), 360.0)
    return scaler


def test_it_flips_who_serves_and_waits_until_that_has_ended():
    scaler = pressed()
    (flip,) = scaler.look(361.0)
    assert flip.role is Role.PREFILL and flip.worker.startswith("decode")
    scaler.observe(ROUTER, WorkerStands(flip.worker, 1, "leaving", "decode"), 361.0)
    assert scaler.look(365.0) == []
    left = next(each for each in scaler.configs.values() if each.worker == flip.worker)
    scaler.observe(ROUTER, WorkerJoined(worker(left.worker, Role.PREFILL)), 370.0)
    scaler.observe(ROUTER, WorkerStands(flip.worker, 1, "serving", "prefill"), 370.0)
    assert scaler.configs[flip.worker].role is Role.PREFILL
    scaler.look(371.0)
    assert scaler.autoscaler.stance == "resting"


def test_a_refused_flip_is_not_asked_for_again():
    scaler = pressed()
    (flip,) = scaler.look(361.0)
    scaler.observe(ROUTER, WorkerStands(flip.worker, 1, "serving", "decode", "decode-0 is leaving already"), 361.0)
    scaler.look(362.0)
    again = scaler.look(390.0)
    assert again and again[0].worker != flip.worker


def test_a_lost_worker_ends_its_flip():
    scaler = pressed()
    (flip,) = scaler.look(361.0)
    scaler.observe(ROUTER, WorkerLost(flip.worker), 362.0)
    scaler.look(363.0)
    assert scaler.autoscaler.stance == "resting" and flip.worker not in scaler.configs
