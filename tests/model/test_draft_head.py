"""A head's folder: what is read of it, and that another model's is refused with both values."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jdisagg.core.errors import CheckpointError, ConfigError
from jdisagg.model.draft_head import FC, FC_BIAS, INPUT_NORM, NORM, TOKENS, read_head
from jdisagg.model.export import config_json, save_hf, write_json
from tests.engine.heads import ignorant_arrays
from tests.engine.stacks import CONFIG


def folder(path: Path, config: Any = CONFIG, without: str = "", more: Mapping[str, np.ndarray] | None = None) -> Path:
    """As EAGLE's are published."""
    arrays = ignorant_arrays((3, 4, 9)) | dict(more or {})
    save_hf(path, ((name, array) for name, array in arrays.items() if name != without))
    write_json(path / "config.json", config_json(replace(config, num_layers=1), "float32"))
    return path


def test_a_published_head_has_no_norm_before_its_layer_and_perhaps_tokens_of_its_own(tmp_path: Path):
    found = read_head(folder(tmp_path), CONFIG, "here")
    assert (found.bias, found.input_norm, found.norm, found.tokens) == (False, False, False, (3, 4, 9))
    ones = {name: np.ones(32, np.float32) for name in (FC_BIAS, INPUT_NORM, NORM)}
    whole = folder(tmp_path, without=TOKENS, more=ones)
    found = read_head(whole, CONFIG, "here")
    assert (found.bias, found.input_norm, found.norm, found.tokens) == (True, True, True, None)
    assert found.num_tokens == CONFIG.vocab_size


@pytest.mark.parametrize(
    ("said", "windows"),
    [
        ({"sliding_window": 5}, (5,)),
        ({"sliding_window": None}, ()),
        ({"sliding_window": 5, "use_sliding_window": False}, ()),
    ],
)
def test_a_heads_window_counts_whatever_its_family(tmp_path: Path, said: dict[str, Any], windows: tuple[int, ...]):
    config = config_json(replace(CONFIG, num_layers=1), "float32")
    write_json(folder(tmp_path) / "config.json", config | said)
    assert read_head(tmp_path, CONFIG, "here").layer.layer_windows == windows


def test_a_window_that_is_no_number_of_tokens_is_refused(tmp_path: Path):
    config = config_json(replace(CONFIG, num_layers=1), "float32")
    write_json(folder(tmp_path) / "config.json", config | {"sliding_window": "wide"})
    with pytest.raises(ConfigError, match="sliding_window = 'wide' is no number of tokens"):
        read_head(tmp_path, CONFIG, "here")


@pytest.mark.parametrize(
    "name, other", [("hidden_size", 64), ("vocab_size", 98), ("num_kv_heads", 4), ("head_dim", 16)]
)
def test_another_models_head_is_refused_with_both_numbers(tmp_path: Path, name: str, other: int):
    with pytest.raises(ConfigError, match=f"here has a {name} of {getattr(CONFIG, name)} and the model one of {other}"):
        read_head(folder(tmp_path), replace(CONFIG, **{name: other}), "here")


def test_a_folder_of_something_else_is_no_head(tmp_path: Path):
    with pytest.raises(CheckpointError, match="here: there is no config"):
        read_head(tmp_path, CONFIG, "here")
    with pytest.raises(CheckpointError, match=f"here has no tensor {FC}: it is no EAGLE head"):
        read_head(folder(tmp_path, without=FC), CONFIG, "here")


@pytest.mark.parametrize("places", [[5, 4], [-1], [97]])
def test_tokens_that_the_model_does_not_have_are_refused(tmp_path: Path, places: list[int]):
    wrong = {TOKENS: np.array(places) - np.arange(len(places))}
    with pytest.raises(ConfigError, match=f"d2t names {len(places)} tokens that are not ascending ones of 97"):
        read_head(folder(tmp_path, more=wrong), CONFIG, "here")
