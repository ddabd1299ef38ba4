"""The table of failures leaves nothing open: each deadline and each loss has its remedy in every phase it can come."""

import pytest

from jdisagg.core.request import Phase
from jdisagg.policy.failures import TABLE, Remedy, Trouble, remedy
from jdisagg.policy.rows import TROUBLE_OF_WAIT, Waiting

LIVE = (Phase.QUEUED, Phase.PREFILLING, Phase.SHIPPING, Phase.DECODING)


def test_every_wait_for_a_worker_ends_in_a_trouble_that_is_met():
    assert set(TROUBLE_OF_WAIT) == set(Waiting) - {Waiting.BED}
    for trouble in TROUBLE_OF_WAIT.values():
        assert any(remedy(trouble, phase) is not Remedy.IGNORE for phase in LIVE)


@pytest.mark.parametrize("phase", LIVE)
def test_the_end_of_either_worker_is_met_in_every_phase_that_needs_it(phase):
    assert remedy(Trouble.DECODE_LOST, phase) is not Remedy.IGNORE
    assert remedy(Trouble.DECODE_GAVE_UP, phase) is not Remedy.IGNORE
    assert (remedy(Trouble.PREFILL_LOST, phase) is Remedy.IGNORE) == (phase is Phase.DECODING)


def test_what_a_client_was_told_is_kept_from_the_first_token_on():
    for (_, phase), found in TABLE.items():
        if found is not Remedy.IGNORE:
            assert found is (Remedy.RESUME if phase in (Phase.SHIPPING, Phase.DECODING) else Remedy.REPREFILL)


@pytest.mark.parametrize("phase", [Phase.FINISHED, Phase.CANCELLED, Phase.FAILED])
@pytest.mark.parametrize("trouble", Trouble)
def test_nothing_is_done_for_what_is_over(trouble, phase):
    assert remedy(trouble, phase) is Remedy.IGNORE
