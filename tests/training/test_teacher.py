"""A model that learns from another: what the other writes is what it would draw, and the pupil comes to think as it."""

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.core.errors import CheckpointError, ConfigError
from jdisagg.core.model_config import ModelConfig
from jdisagg.training.data import CorpusFiles
from jdisagg.training.run import TrainSettings, finish, open_run, train
from jdisagg.training.step import logits_of, new_network
from jdisagg.training.teacher import TeacherModel, TeacherSettings, agreement, answers_of, open_teacher, pupil_of

KNOWING = ModelConfig("llama", 320, 32, 48, 2, 4, 2, 8, 64, tie_embeddings=True)
ASKED = TeacherSettings("", answers=3, answer_tokens=9, prompt_tokens=4, temperatures=(0.0,), batch=2)


def test_answers_are_what_a_whole_forward_thinks_likeliest_behind_prompts_of_the_corpus():
    teacher, stream = TeacherModel(ASKED, KNOWING, new_network(KNOWING, 1)), np.arange(300, dtype=np.uint16)
    written = answers_of(teacher, stream, seed=5).reshape(3, 13)
    for answer in written:
        assert answer[:4].tolist() == list(range(answer[0], answer[0] + 4))
        likeliest = jnp.argmax(
            logits_of(teacher.network.merge(teacher.network.leaves), jnp.asarray(answer)[None, :-1]), axis=-1
        )
        assert likeliest[0, 3:].tolist() == answer[4:].tolist()


def test_answers_at_a_temperature_are_others_for_another_seed():
    hot = replace(ASKED, temperatures=(1.0,))
    teacher, stream = TeacherModel(hot, KNOWING, new_network(KNOWING, 1)), np.arange(300, dtype=np.uint16)
    one, other, again = (answers_of(teacher, stream, seed) for seed in (1, 2, 1))
    assert one.tolist() == again.tolist() != other.tolist()


@pytest.mark.slow
def test_a_pupil_begins_as_its_teacher_cut_short_and_learns_what_is_missing(
    settings: TrainSettings, corpus: CorpusFiles, tmp_path: Path
):
    schooled = replace(settings, model=replace(settings.model, num_layers=2))
    run = open_run(schooled, corpus, resume=True)
    finish(run, corpus, train(run, corpus, stop_at=1))
    folder = replace(ASKED, folder=settings.run.export_dir, answers=40, answer_tokens=28)
    files = replace(settings.run, out_dir=str(tmp_path / "pupil"), export_dir=str(tmp_path / "draft"), lesson_share=0.0)
    run = open_run(replace(settings, teacher=folder, run=files), corpus, resume=True)
    teacher = open_teacher(folder, settings.model)
    assert len(run.leaves) < len(teacher.network.leaves) and len(run.stream) == 40 * 32
    reports = train(run, corpus)
    assert reports[-1].loss < reports[0].loss < 1.0
    finish(run, corpus, reports)
    assert (tmp_path / "draft" / "model.safetensors").exists()
    tokens = [jnp.asarray(run.stream[: 32 * 8].reshape(8, 32).astype(np.int32))]
    assert agreement(run.network, run.leaves, teacher, tokens) > 1 / 320
    itself = pupil_of(teacher, teacher.config, 0)
    assert agreement(itself, itself.leaves, teacher, tokens) == 1.0


def test_a_pupil_of_other_sizes_begins_with_nothing():
    teacher = TeacherModel(ASKED, KNOWING, new_network(KNOWING, 1))
    small = replace(KNOWING, hidden_size=16)
    same = new_network(small, 7)
    assert all(map(jnp.array_equal, pupil_of(teacher, small, 7).leaves, same.leaves))


def test_a_teacher_with_other_tokens_is_refused_with_both_numbers(settings: TrainSettings):
    embedded = Path(__file__).parents[2] / "jdisagg" / "embedded"
    with pytest.raises(ConfigError, match="a vocabulary of 4096 tokens and the model beside it one of 320"):
        open_teacher(replace(ASKED, folder=str(embedded)), settings.model)
    with pytest.raises(CheckpointError, match=r"teacher.folder = nowhere"):
        open_teacher(replace(ASKED, folder="nowhere"), settings.model)
