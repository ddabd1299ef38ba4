"""A head learns from what its model wrote, and is read back from the folder that it is exported to."""

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.core.errors import ConfigError, FlagError
from jdisagg.model.checkpoint import read_model
from jdisagg.model.draft_head import read_head
from jdisagg.training.data import TargetSettings, open_target, read_or_write
from jdisagg.training.heads import (
    HeadSettings,
    check_same_tokens,
    export_head,
    frequent,
    judge,
    later,
    open_head_run,
    read_head_settings,
    train_head,
)
from jdisagg.training.step import OptimiserSettings
from tests.fixtures import conformance

CODE = np.arange(3, 90, dtype=np.int32)


@pytest.mark.slow
def test_a_head_learns_what_its_model_wrote_and_goes_on_where_it_was_interrupted(tmp_path: Path):
    folder = str(conformance.load("llama3").folder)
    target = open_target(TargetSettings(folder, parts=2, batch=6, length_tokens=24, prompt_tokens=5))
    parts = read_or_write(target, tmp_path / "answers", CODE)
    again = read_or_write(target, tmp_path / "answers", CODE)
    assert [part.tokens.tolist() for part in parts] == [part.tokens.tolist() for part in again]
    assert parts[0].tokens.shape == (6, 24) and parts[0].states.shape == (6, 24, target.config.hidden_size)
    settings = HeadSettings(20, 8, 4, str(tmp_path / "run"), str(tmp_path / "head"), save_every=4, held_out=2)
    rate = OptimiserSettings(3e-3, warmup_steps=1, decay_steps=4)
    run = open_head_run(replace(settings, steps=8), rate, target, parts)
    train_head(run)
    assert [step for step, _ in run.losses] == [4, 8] and run.losses[1][1] < run.losses[0][1]
    export_head(run)
    found = read_head(tmp_path / "head", read_model(folder), "here")
    assert found.tokens == run.config.tokens and found.num_tokens == 20 and found.norm and found.input_norm
    assert found.layer.layer_windows == (24,), "as far back as it ever saw"
    resumed = open_head_run(settings, rate, target, parts)
    assert resumed.step == 8 and judge(resumed) == judge(run)


def test_the_most_frequent_tokens_are_guessed_among_in_order():
    config = read_model(conformance.load("llama3").folder)
    assert frequent(np.array([[7, 7, 2, 9, 9, 9]]), 2, config) == (7, 9)
    assert frequent(np.array([[7]]), 0, config) is None


def test_a_head_does_not_go_on_from_weights_that_guess_among_other_tokens(tmp_path: Path):
    check_same_tokens(tmp_path, 2, (3, 5, 7), resumes=False)
    check_same_tokens(tmp_path, 2, (3, 5, 7), resumes=True)
    with pytest.raises(ConfigError, match=r"parts = 2 use most, and parts = 4 use others: delete .*/checkpoints"):
        check_same_tokens(tmp_path, 4, (3, 5, 9), resumes=True)
    check_same_tokens(tmp_path, 4, (3, 5, 7), resumes=True)
    check_same_tokens(tmp_path, 4, (3, 5, 9), resumes=False)
    with pytest.raises(ConfigError, match="parts = 4 use most, and parts = 3"):
        check_same_tokens(tmp_path, 3, None, resumes=True)


def test_the_state_before_the_first_token_is_zeros():
    states = jnp.arange(12.0).reshape(1, 3, 4) + 1
    assert later(states)[0].tolist() == [[0.0] * 4, *states[0, :2].tolist()]


def test_settings_of_a_head_are_read_and_what_they_do_not_know_is_named(tmp_path: Path):
    for name in ("draft_smollm2", "draft_embedded_head"):
        found = read_head_settings(Path("configs") / f"{name}.toml")
        assert found is not None and found.head.steps >= found.optimiser.warmup_steps + found.optimiser.decay_steps
    assert read_head_settings(Path("configs/draft_embedded.toml")) is None
    (tmp_path / "wrong.toml").write_text("[head]\n[model]\n")
    with pytest.raises(FlagError, match="unknown table model in "):
        read_head_settings(tmp_path / "wrong.toml")
    with pytest.raises(ConfigError, match="cannot read the configuration nowhere"):
        read_head_settings(Path("nowhere.toml"))
