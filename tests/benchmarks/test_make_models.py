"""Random checkpoints, read back by our own reader."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers.make_models import SHAPES, make, tensors
from jdisagg.core.model_config import ModelConfig
from jdisagg.model.hf_config import read_config
from jdisagg.model.params import check_tensors
from jdisagg.model.sources import HFSource
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.training.data import make_tokenizer

TINY = ModelConfig("llama", 300, 16, 32, 2, 4, 2, 4, max_position=64, tie_embeddings=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make(folder, TINY, make_tokenizer(["def f(x):\n    return x\n"], 300), seed=1)
    return folder


def test_our_reader_takes_the_folder_as_the_model_it_was_made_from(folder: Path) -> None:
    assert read_config(folder) == TINY
    check_tensors(HFSource(folder), TINY)
    tokenizer = Tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("return x")) == "return x"


def test_a_llama_has_nine_tensors_a_layer_and_no_head_of_its_own_when_tied(folder: Path) -> None:
    assert len(HFSource(folder).names) == 2 + 9 * TINY.num_layers


def test_a_seed_is_a_model() -> None:
    first, again, other = (dict(tensors(TINY, seed)) for seed in (1, 1, 2))
    name = "model.layers.1.mlp.up_proj.weight"
    np.testing.assert_array_equal(first[name], again[name])
    assert not np.array_equal(first[name], other[name])


def test_the_two_sizes_are_those_that_figures_are_quoted_for() -> None:
    millions = {name: round(shape.num_params() / 1e6, 1) for name, shape in SHAPES.items()}
    assert millions == {"small": 27.8, "base": 116.4}
