"""GGUF files of models with experts and latents against the folders that they were made of."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file, save_file

from jdisagg.commands.convert import convert
from jdisagg.core.errors import UnsupportedModel, WrongShape
from jdisagg.model.checkpoint import open_source, read_model
from jdisagg.model.gguf.file import read_gguf
from jdisagg.model.gguf.source import GGUFSource
from jdisagg.model.hf_config import read_config
from jdisagg.model.params import StageSpec, check_tensors, load_stage
from tests.fixtures.conformance import ROOT, load
from tests.fixtures.gguf_files import byte_level, write
from tests.fixtures.sparse_gguf import numbers, sparse_gguf
from tests.model.sharded import mesh_of, run_stage, stage_output
from tests.model.test_gguf_source import padded, whole_model

FILES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "gpt_oss": {},
    "deepseek2": {},
    "deepseek3": {},
    "deepseek2 of 2024": {"latents_in_two": False},
    "deepseek3 of 2024": {"latents_in_two": False},
}


def folder_of(name: str, place: Path) -> Path:
    """The conformance folder; DeepSeek's with one `mscale`, as all models have and files can say."""
    folder = place / "folder"
    shutil.copytree(ROOT / name.split(maxsplit=1)[0], folder)
    said = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "mscale" in (said.get("rope_parameters") or {}):
        said["rope_parameters"]["mscale"] = said["rope_parameters"]["mscale_all_dim"]
        (folder / "config.json").write_text(json.dumps(said), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", FILES)
def test_a_file_in_f32_is_the_folder_that_it_was_made_of(name: str, tmp_path: Path):
    folder = folder_of(name, tmp_path)
    path = sparse_gguf(folder, tmp_path / "model.gguf", **FILES[name])
    config, ours = read_model(path), read_config(folder)
    assert config == replace(ours, rms_norm_eps=config.rms_norm_eps) and np.isclose(
        config.rms_norm_eps, ours.rms_norm_eps
    )
    check_tensors(GGUFSource(path), config)
    model, expected = whole_model(path), whole_model(folder)
    for prompt in load(name.split(maxsplit=1)[0]).prompts:
        np.testing.assert_allclose(model(prompt), expected(prompt), atol=1e-4)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek3"])
def test_shards_of_a_file_give_the_same_logits(family: str, tp: int, tmp_path: Path):
    folder, prompt = folder_of(family, tmp_path), load(family).prompts[1]
    path = sparse_gguf(folder, tmp_path / "model.gguf")
    config = read_model(path)
    params = load_stage(GGUFSource(path), StageSpec(config, range(config.num_layers), mesh_of(tp), jnp.float32))
    logits = run_stage(params, mesh_of(tp), stage_output, padded(prompt))
    np.testing.assert_allclose(logits[: len(prompt)], whole_model(folder)(prompt), atol=1e-4)


@pytest.mark.parametrize("name", FILES)
def test_a_slice_is_the_same_as_the_slice_of_the_whole(name: str, tmp_path: Path):
    source = GGUFSource(sparse_gguf(ROOT / name.split(maxsplit=1)[0], tmp_path / "model.gguf", **FILES[name]))
    for tensor in source.names:
        shape = source.shape(tensor)
        assert shape is not None and source.dtype(tensor) == "float32"
        whole = source.read(tensor, tuple(slice(0, size) for size in shape))
        assert whole.shape == shape and whole.dtype == np.float32
        index = tuple(slice(size // 3, max(size // 3 + 1, size - 1)) for size in shape)
        np.testing.assert_array_equal(source.read(tensor, index), whole[index], tensor)


def test_experts_in_mxfp4_are_those_that_ggufs_own_code_makes_of_them(tmp_path: Path):
    """gpt-oss' gate and up, whose rows are whole blocks in the fixture."""
    folder, kinds = tmp_path / "folder", {"ffn_gate_exps.weight": Kind.MXFP4, "ffn_up_exps.weight": Kind.MXFP4}
    path = sparse_gguf(ROOT / "gpt_oss", tmp_path / "model.gguf", kinds)
    assert "MXFP4" in GGUFSource(path).label
    tensors = load_file(ROOT / "gpt_oss" / "model.safetensors")
    for name in [each for each in tensors if each.endswith("gate_up_proj")]:
        out = tensors[name].astype(np.float32).swapaxes(1, 2).copy()
        for turn in range(2):
            part = np.ascontiguousarray(out[:, turn::2])
            out[:, turn::2] = gguf.dequantize(gguf.quantize(part, Kind.MXFP4), Kind.MXFP4)
        assert not np.array_equal(out.swapaxes(1, 2), tensors[name])
        tensors[name] = np.ascontiguousarray(out.swapaxes(1, 2))
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_bytes((ROOT / "gpt_oss" / "config.json").read_bytes())
    ours, theirs = whole_model(path), whole_model(folder)
    for prompt in load("gpt_oss").prompts:
        np.testing.assert_allclose(ours(prompt), theirs(prompt), atol=2e-4)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek3"])
def test_a_converted_file_is_the_same_model(name: str, tmp_path: Path):
    path, folder = sparse_gguf(ROOT / name, tmp_path / "model.gguf"), tmp_path / "folder"
    convert(path, folder, "hf", None)
    config, stored = read_model(folder), GGUFSource(path)
    assert config == read_model(path)
    source = open_source(folder, "hf", config)
    check_tensors(source, config)
    for tensor in stored.names:
        index = tuple(slice(0, size) for size in stored.shape(tensor) or ())
        np.testing.assert_array_equal(source.read(tensor, index), stored.read(tensor, index), tensor)


def test_groups_that_a_file_does_not_say_are_those_of_the_models_that_have_them(tmp_path: Path):
    """Tensors are not looked at."""

    def groups(family: str, number: int) -> tuple[int, int]:
        folder = tmp_path / f"{family}-{number}"
        folder.mkdir()
        config = read_config(ROOT / family)
        assert config.experts is not None
        keys = {k: v for k, v in numbers(config).items() if "group" not in k} | {"expert_count": number}
        tensors = [("token_embd.weight", np.zeros((288, 48), np.float32), Kind.F32)]
        experts = read_model(write(folder / "model.gguf", "deepseek2", keys, tensors, byte_level())).experts
        assert experts is not None
        return experts.groups, experts.kept_groups

    assert [groups("deepseek3", number) for number in (256, 64)] == [(8, 4), (1, 1)]
    assert [groups("deepseek2", number) for number in (160, 64)] == [(8, 3), (1, 1)]


def test_experts_of_another_number_than_the_file_says_are_named_as_the_file_names_them(tmp_path: Path):
    path = sparse_gguf(ROOT / "mixtral", tmp_path / "model.gguf")
    config = read_model(path)
    assert config.experts is not None
    tensors = [(name, np.zeros(tensor.shape, np.float32), Kind.F32) for name, tensor in read_gguf(path).tensors.items()]
    keys = numbers(config) | {"expert_count": 6}
    other = write(tmp_path / "other.gguf", "llama", keys, tensors, byte_level())
    with pytest.raises(WrongShape, match=r"blk\.0\.ffn_gate_exps\.weight has shape \(5, 24, 32\).*\(6, 24, 32\)"):
        GGUFSource(other)


def test_a_dense_family_with_experts_is_refused_by_name(tmp_path: Path):
    keys = numbers(read_config(ROOT / "mixtral"))
    tensors = [("token_embd.weight", np.zeros((288, 32), np.float32), Kind.F32)]
    with pytest.raises(UnsupportedModel, match=r"qwen2\.expert_count = 5"):
        read_model(write(tmp_path / "model.gguf", "qwen2", keys, tensors, byte_level()))
