"""A small library of Python files with a mark in each, and settings of a model that trains on it in a second."""

from dataclasses import replace
from pathlib import Path

import pytest

from jdisagg.core.model_config import ModelConfig
from jdisagg.training.data import CorpusFiles, TrainingPhase, read_corpus
from jdisagg.training.run import RunSettings, TrainSettings
from jdisagg.training.step import OptimiserSettings

SOURCE = '''"""Module {name}."""


def marked_{name}(first, second):
    """Return the mark of {name} times first, plus second."""
    total = 0
    for index in range(first):
        total += index * {name}
    return "mark-{name}-", total + second
'''


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("library")
    for number in range(100):
        folder = root / f"package{number % 5}"
        folder.mkdir(exist_ok=True)
        (folder / f"module{number}.py").write_text(SOURCE.format(name=1000 + number))
    (root / "test").mkdir()
    (root / "test" / "test_module.py").write_text(SOURCE.format(name=7777))
    (root / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nname = '\xe9'\n")
    return root


@pytest.fixture(scope="session")
def corpus(library: Path) -> CorpusFiles:
    return read_corpus(library)


@pytest.fixture
def settings(tmp_path: Path) -> TrainSettings:
    return TrainSettings(
        run=RunSettings(
            out_dir=str(tmp_path / "run"),
            export_dir=str(tmp_path / "exported"),
            seed=3,
            save_every=3,
            log_every=1,
            eval_every=4,
            eval_windows=2,
            lesson_share=0.5,
        ),
        model=ModelConfig("llama", 320, 32, 48, 1, 4, 2, 8, 64, tie_embeddings=True),
        optimiser=OptimiserSettings(learning_rate=3e-3, warmup_steps=1, decay_steps=3),
        phases=(TrainingPhase(4, 32, 2), TrainingPhase(2, 64, 1)),
    )


@pytest.fixture
def untied(settings: TrainSettings) -> TrainSettings:
    return replace(settings, model=replace(settings.model, num_layers=2, tie_embeddings=False))
