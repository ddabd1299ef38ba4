"""Checkpoints with one tensor of all experts load as those with a tensor for each, and cost a shard no more reading."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jdisagg.core.errors import MissingTensor, WrongShape
from jdisagg.model.checkpoint import open_source
from jdisagg.model.families import EXPERT_NAMES
from jdisagg.model.hf_config import read_config
from jdisagg.model.params import StageSpec, check_tensors, load_stage
from tests.fixtures.conformance import ROOT
from tests.model.sharded import mesh_of


def fused(family: str, folder: Path, most: int = 1000) -> Path:
    """The fixture's weights as transformers 5 holds them, of the first `most` experts."""
    names = EXPERT_NAMES[family]
    gate, up, down = names.matrices
    tensors = load_file(ROOT / family / "model.safetensors")
    stored = {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            stored[name.replace(names.block, "mlp")] = tensor
            continue
        head, number, matrix, _ = name.rsplit(".", 3)
        prefix = head.replace(names.block, "mlp")
        every = [f"{head}.{each}" for each in range(most) if f"{head}.{each}.{matrix}.weight" in tensors]
        if matrix == gate and number == "0":
            both = [np.concatenate([tensors[f"{each}.{name}.weight"] for name in (gate, up)]) for each in every]
            stored[f"{prefix}.gate_up_proj"] = np.stack(both)
        if matrix == down and number == "0":
            stored[f"{prefix}.down_proj"] = np.stack([tensors[f"{each}.{down}.weight"] for each in every])
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_bytes((ROOT / family / "config.json").read_bytes())
    return folder


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_fused_experts_load_as_the_same_weights(family: str, tp: int, tmp_path: Path):
    config = read_config(ROOT / family)
    sources = [open_source(place, "hf", config) for place in (ROOT / family, fused(family, tmp_path))]
    check_tensors(sources[1], config)
    split, joined = (
        load_stage(each, StageSpec(config, range(1, 3), mesh_of(tp), jnp.float32)).leaves for each in sources
    )
    for one, other in zip(split, joined, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_fused_tensor_of_too_few_experts_or_rows_is_refused_by_name(tmp_path: Path):
    config = read_config(ROOT / "mixtral")
    folder = fused("mixtral", tmp_path, most=4)
    few = r"layers\.0\.mlp\.experts\.down_proj in .* has shape \(4, 32, 24\); the config asks for \(5, 32, 24\)"
    with pytest.raises(WrongShape, match=few):
        check_tensors(open_source(folder, "hf", config), config)
    tensors = load_file(fused("mixtral", tmp_path) / "model.safetensors")
    name = "model.layers.2.mlp.experts.gate_up_proj"
    save_file(tensors | {name: tensors[name][:, :40].copy()}, folder / "model.safetensors")
    with pytest.raises(WrongShape, match=r"layers\.2\.mlp\.experts\.gate_up_proj .*\(5, 40, 32\).*\(5, 48, 32\)"):
        check_tensors(open_source(folder, "hf", config), config)


@pytest.mark.parametrize("missing", ["layers.0.mlp.experts.gate_up_proj", "layers.2.mlp.experts.down_proj"])
def test_a_fused_tensor_that_is_not_there_is_missed_by_the_name_that_the_file_would_have(missing: str, tmp_path: Path):
    config = read_config(ROOT / "mixtral")
    tensors = load_file(fused("mixtral", tmp_path) / "model.safetensors")
    del tensors[f"model.{missing}"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(MissingTensor, match=rf"tensor model\.{missing} is not in"):
        check_tensors(open_source(tmp_path, "hf", config), config)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_an_experts_own_tensor_is_missed_by_its_own_name_where_each_has_one(family: str, tmp_path: Path):
    config, names = read_config(ROOT / family), EXPERT_NAMES[family]
    tensors = load_file(ROOT / family / "model.safetensors")
    missing = f"model.layers.2.{names.block}.experts.3.{names.matrices[2]}.weight"
    del tensors[missing]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(MissingTensor, match=f"tensor {missing} is not in"):
        check_tensors(open_source(tmp_path, "hf", config), config)
