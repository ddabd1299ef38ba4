"""Adapters' folders: what PEFT writes is read as PEFT means it, and what is not served is refused by name and value."""

import json
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jdisagg.core.errors import CheckpointError
from jdisagg.core.model_config import Experts, ModelConfig
from jdisagg.core.request import Adapter
from jdisagg.model.lora import AdapterWeights, identified, read_adapter
from tests.adapter_files import write_adapter

MODEL = ModelConfig("llama", 97, 32, 64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_position=128)
Q = "base_model.model.model.layers.0.self_attn.q_proj"


def read(folder: Path, model: ModelConfig = MODEL, max_rank: int = 8) -> AdapterWeights:
    return read_adapter(identified("sql", str(folder)), model, max_rank)


def retold(folder: Path, tensors: dict[str, Any]) -> Path:
    """With these tensors in place of its own; None: without it."""
    path = folder / "adapter_model.safetensors"
    found = {**load_file(path), **tensors}
    save_file({name: each for name, each in found.items() if each is not None}, path)
    return folder


def scale_of(folder: Path, layer: int, name: str) -> float:
    """By which the stored B is multiplied."""
    module = f"self_attn.{name}"
    stored = load_file(folder / "adapter_model.safetensors")[
        f"base_model.model.model.layers.{layer}.{module}.lora_B.weight"
    ]
    return float(np.median(read(folder).pairs[layer, module].b / stored))


@pytest.mark.parametrize(
    ("change", "scale"),
    [
        ({"lora_alpha": 6}, 6 / 4),
        ({"lora_alpha": 6, "use_rslora": True}, 6 / sqrt(4)),
        ({"lora_alpha": None}, 8 / 4),
        ({"lora_alpha": 6, "alpha_pattern": {"q_proj": 10}}, 10 / 4),
        ({"lora_alpha": 6, "alpha_pattern": {"layers.1.self_attn.q_proj": 10}}, 6 / 4),
        ({"lora_alpha": 6, "alpha_pattern": {"model.layers.0.self_attn.[qk]_proj": 10}}, 10 / 4),
    ],
)
def test_a_matrix_is_scaled_as_peft_scales_it(tmp_path: Path, change: dict[str, Any], scale: float) -> None:
    folder = write_adapter(tmp_path, MODEL, 0, rank=4, change=change)
    assert scale_of(folder, 0, "q_proj") == pytest.approx(scale)


def test_a_pattern_gives_some_matrices_another_rank(tmp_path: Path) -> None:
    write_adapter(tmp_path, MODEL, 0, rank=2, targets=("q_proj",), change={"rank_pattern": {"v_proj": 6}})
    other = write_adapter(tmp_path / "other", MODEL, 1, rank=6, targets=("v_proj",))
    weights = read(retold(tmp_path, load_file(other / "adapter_model.safetensors")))
    assert weights.rank == 6
    assert {len(pair.a) for (_, name), pair in weights.pairs.items() if name == "self_attn.q_proj"} == {2}
    assert {pair.b.shape for (_, name), pair in weights.pairs.items() if name == "self_attn.v_proj"} == {(16, 6)}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"peft_type": "IA3"}, "peft_type = 'IA3'"),
        ({"use_dora": True}, "use_dora = True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\]"),
        ({"bias": "all"}, "bias = 'all'; needed: \"none\""),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights = 'pissa_niter_4'"),
        ({"target_parameters": ["experts.gate"]}, "target_parameters"),
        ({"r": 0}, "r = 0; needed: a whole number from 1"),
        ({"r": "4"}, "r = '4'"),
        ({"alpha_pattern": {"(q": 3}}, "regular expression"),
        ({"r": 9}, "has rank 9, over --max_lora_rank=8"),
        ({"r": 5}, r"has shape \(4, 64\); rank 5 and the model ask for \(5, 64\)"),
    ],
)
def test_a_config_that_means_something_else_is_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    folder = write_adapter(tmp_path, MODEL, 0, rank=4, change=change)
    with pytest.raises(CheckpointError, match=says) as told:
        read(folder)
    assert "sql" in str(told.value) and "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({f"{Q}.lora_A.weight": np.zeros((4, 33), "f4")}, r"q_proj.lora_A.weight has shape \(4, 33\).*\(4, 32\)"),
        ({f"{Q}.lora_B.weight": np.zeros((31, 4), "f4")}, r"lora_B.weight has shape \(31, 4\).*\(32, 4\)"),
        ({f"{Q}.lora_B.weight": None}, "q_proj has no lora_B beside"),
        ({f"{Q}.lora_B.weight": np.full((32, 4), np.nan, "f4")}, "not finite"),
        ({f"{Q}.lora_B.weight": np.zeros((32, 4), "i8")}, "has dtype I64"),
        ({f"{Q}.lora_magnitude_vector": np.zeros(4, "f4")}, "lora_magnitude_vector adds to no matrix"),
        ({"base_model.model.lm_head.lora_A.weight": np.zeros((4, 32), "f4")}, "lm_head.*may: q_proj|o_proj"),
        ({Q.replace(".0.", ".2.") + ".lora_A.weight": np.zeros((4, 32), "f4")}, "layers.2.*adds to no matrix"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name_and_shape(
    tmp_path: Path, tensors: dict[str, Any], says: str
) -> None:
    with pytest.raises(CheckpointError, match=says):
        read(retold(write_adapter(tmp_path, MODEL, 0), tensors))


def test_experts_are_refused_and_what_is_beside_them_is_read(tmp_path: Path) -> None:
    sparse = ModelConfig("mixtral", 97, 32, 64, 2, 4, 2, 8, 128, experts=Experts(4, 2, 64))
    weights = read(write_adapter(tmp_path, sparse, 0), sparse)
    assert {name for _, name in weights.pairs} == {f"self_attn.{which}_proj" for which in "qkvo"}
    expert = "base_model.model.model.layers.0.block_sparse_moe.experts.0.w1.lora_A.weight"
    with pytest.raises(CheckpointError, match=r"experts.0.w1.lora_A.weight adds to no matrix"):
        read(retold(tmp_path, {expert: np.zeros((4, 32), "f4")}), sparse)


def test_files_that_are_not_there_or_not_read_are_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"sql: .*nowhere is no folder"):
        identified("sql", str(tmp_path / "nowhere"))
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"has adapter_model.bin, a pickle"):
        identified("sql", str(tmp_path))
    write_adapter(tmp_path, MODEL, 0)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match=r"cannot read .*adapter_model.safetensors"):
        read(tmp_path)


def test_files_that_changed_since_are_not_the_adapter_that_was_asked_for(tmp_path: Path) -> None:
    adapter: Adapter = identified("sql", str(write_adapter(tmp_path, MODEL, 0)))
    assert identified("sql", str(write_adapter(tmp_path, MODEL, 0))) == adapter
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 1}))
    with pytest.raises(CheckpointError, match="are others than when it was loaded"):
        read_adapter(adapter, MODEL, 8)
