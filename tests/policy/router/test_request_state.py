"""The table of failures leaves nothing open: each deadline and each loss has its recovery in every phase it can
come."""

from __future__ import annotations

import pytest

from jdisagg.core.request import Phase
from jdisagg.policy.router.request_state import FAILURE_OF_WAIT, TABLE, FailureKind, Recovery, Waiting, recovery

LIVE = (Phase.QUEUED, Phase.PREFILLING, Phase.SHIPPING, Phase.DECODING)


def test_every_wait_for_a_worker_ends_in_a_trouble_that_is_met():
    nobody_fails = {Waiting.RESERVATION, Waiting.KEEPER}  # the line goes on; who kept nothing is begun anew
    assert set(FAILURE_OF_WAIT) == set(Waiting) - nobody_fails
    for kind in FAILURE_OF_WAIT.values():
        assert any(recovery(kind, phase) is not Recovery.IGNORE for phase in LIVE)


@pytest.mark.parametrize("phase", LIVE)
def test_the_end_of_either_worker_is_met_in_every_phase_that_needs_it(phase):
    assert recovery(FailureKind.DECODE_LOST, phase) is not Recovery.IGNORE
    assert recovery(FailureKind.DECODE_GAVE_UP, phase) is not Recovery.IGNORE
    assert (recovery(FailureKind.PREFILL_LOST, phase) is Recovery.IGNORE) == (phase is Phase.DECODING)


def test_what_a_client_was_told_is_kept_from_the_first_token_on():
    for (_, phase), found in TABLE.items():
        if found is not Recovery.IGNORE:
            assert found is (Recovery.RESUME if phase in (Phase.SHIPPING, Phase.DECODING) else Recovery.REPREFILL)


@pytest.mark.parametrize("phase", [Phase.FINISHED, Phase.CANCELLED, Phase.FAILED])
@pytest.mark.parametrize("kind", FailureKind)
def test_nothing_is_done_for_what_is_over(kind, phase):
    assert recovery(kind, phase) is Recovery.IGNORE
