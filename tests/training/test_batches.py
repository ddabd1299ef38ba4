"""Data order: a pure function of the step, without repetition inside an epoch."""

import numpy as np
import pytest

from jdisagg.core.errors import ConfigError
from jdisagg.training.data import TrainingPhase, batch_at, phase_at, tokens_before, total_steps

STREAM = np.arange(1000, dtype=np.uint16)
PHASES = (TrainingPhase(12, 32, 5), TrainingPhase(3, 128, 1))


def test_the_same_step_gives_the_same_batch_and_another_seed_another() -> None:
    assert np.array_equal(batch_at(STREAM, PHASES, 1, 7), batch_at(STREAM, PHASES, 1, 7))
    assert not np.array_equal(batch_at(STREAM, PHASES, 1, 7), batch_at(STREAM, PHASES, 2, 7))


def test_an_epoch_takes_every_window_at_most_once() -> None:
    epoch = np.concatenate([batch_at(STREAM, PHASES, 1, step)[:, :-1].ravel() for step in range(6)])
    assert len(np.unique(epoch)) == epoch.size == 6 * 5 * 32
    second = batch_at(STREAM, PHASES, 1, 6)
    assert second[0, 0] % 32 != batch_at(STREAM, PHASES, 1, 0)[0, 0] % 32  # the cuts move between epochs


def test_phases_follow_each_other_with_their_own_shapes() -> None:
    assert batch_at(STREAM, PHASES, 1, 11).shape == (5, 33)
    assert batch_at(STREAM, PHASES, 1, 12).shape == (1, 129)
    assert phase_at(PHASES, 14) == (1, 12) and total_steps(PHASES) == 15
    assert tokens_before(PHASES, 12) == 12 * 160 and tokens_before(PHASES, 14) == 12 * 160 + 2 * 128


def test_every_row_is_a_contiguous_piece_of_the_stream() -> None:
    for row in batch_at(STREAM, PHASES, 1, 9):
        assert np.array_equal(row, np.arange(row[0], row[0] + 33))


def test_steps_behind_the_end_and_streams_too_short_are_named_errors() -> None:
    with pytest.raises(ConfigError, match="step 15 lies behind the last phase, which ends at 15"):
        batch_at(STREAM, PHASES, 1, 15)
    with pytest.raises(ConfigError, match="1000 training tokens hold 0 windows of 512 tokens; a batch takes 4"):
        batch_at(STREAM, (TrainingPhase(1, 512, 4),), 1, 0)
