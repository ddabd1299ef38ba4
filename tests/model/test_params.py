"""Weights reach their shards: every cut holds the same matrices, the host holds one leaf, mistakes are named."""

import json
from dataclasses import replace
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jdisagg.core.errors import CheckpointError, MissingTensor, WrongShape
from jdisagg.core.hardware import Shard
from jdisagg.core.model_config import Experts, ModelConfig
from jdisagg.model.checkpoint import open_source
from jdisagg.model.hf_config import read_config
from jdisagg.model.names import Index, stage_leaves
from jdisagg.model.params import (
    StageParams,
    StageSpec,
    abstract_stage,
    abstract_stage_params,
    check_tensors,
    load_stage,
)
from jdisagg.model.sources import HFSource, RandomSource, TensorSource
from tests.fixtures.conformance import ROOT, families
from tests.model.sharded import mesh_of, split_layers

BIG = ModelConfig("llama", 1024, 256, 1024, 4, 8, 4, 32, 128)


class Counted:
    """A source that notes how many bytes each read handed out."""

    def __init__(self, inner: TensorSource):
        self.inner, self.sizes = inner, list[int]()
        self.place = inner.place

    def dtype(self, name: str) -> str:
        return self.inner.dtype(name)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self.inner.shape(name)

    def read(self, name: str, index: Index) -> np.ndarray:
        found = self.inner.read(name, index)
        self.sizes.append(found.nbytes)
        return found


def load(
    source: TensorSource, config: ModelConfig, layers: range, tp: int, out_first: bool = False
) -> tuple[list[str], StageParams]:
    paths = abstract_stage(config, layers, tp, "tp" if tp > 1 else None, jnp.float32).paths
    return paths, load_stage(source, StageSpec(config, layers, mesh_of(tp), jnp.float32, out_first=out_first))


def reassembled(source: TensorSource, config: ModelConfig, tp: int, pp: int, out_first: bool) -> dict[str, np.ndarray]:
    """Every checkpoint tensor, put together again from the shards' local arrays; a replica must agree."""
    tensors: dict[str, np.ndarray] = {}
    for layers in split_layers(config, pp):
        paths, params = load(source, config, layers, tp, out_first)
        outline = abstract_stage(config, layers, tp, "tp" if tp > 1 else None, jnp.float32, out_first=out_first)
        rules = outline.rules(stage_leaves(config, layers, tp if config.vocab_size % tp == 0 else 1))
        table = dict(zip(paths, rules, strict=True))
        for path, leaf in zip(paths, params.leaves, strict=True):
            for shard, local in enumerate(leaf.addressable_shards):
                for part, index, piece in table[path].cut(np.asarray(local.data), shard, tp):
                    whole = tensors.setdefault(part.name, np.full(part.shape, np.nan, np.float32))
                    known = ~np.isnan(whole[index])
                    assert (whole[index][known] == piece[known]).all()
                    whole[index] = piece
    return tensors


def stored(family: str) -> dict[str, np.ndarray]:
    files = sorted((ROOT / family).glob("*.safetensors"))
    return {name: tensor.astype(np.float32) for path in files for name, tensor in load_file(path).items()}


@pytest.mark.parametrize(
    ("tp", "pp", "out_first"),
    [
        *[(tp, pp, True) for tp, pp in ((1, 1), (1, 4), (2, 1), (2, 2), (4, 1), (4, 4), (3, 1), (5, 1), (8, 1))],
        *[(2, 2, False), (4, 1, False), (3, 2, False)],
    ],
)
@pytest.mark.parametrize("family", families())
def test_every_cut_reassembles_to_the_stored_matrices(family: str, tp: int, pp: int, out_first: bool):
    found = reassembled(HFSource(ROOT / family), read_config(ROOT / family), tp, pp, out_first)
    expected = stored(family)
    assert found.keys() == expected.keys()
    assert all((found[name] == expected[name]).all() for name in expected)


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 5])
def test_a_shard_of_the_fused_matrix_holds_its_q_then_k_then_v_heads(tp: int):
    config, weights = read_config(ROOT / "qwen2"), stored("qwen2")
    paths, params = load(HFSource(ROOT / "qwen2"), config, range(4), tp)
    leaf = params.leaves[paths.index("layers.1.attention.qkv.kernel")]
    prefix = "model.layers.1.self_attn"
    for shard, local in enumerate(leaf.addressable_shards):
        parts = []
        for each, cut in (("q", config.q_cut), ("k", config.kv_cut), ("v", config.kv_cut)):
            held = cut.held(tp, shard)
            rows = weights[f"{prefix}.{each}_proj.weight"][held.start : held.stop]
            parts += [rows, np.zeros((cut.width(tp) - len(held), rows.shape[1]), np.float32)]
        np.testing.assert_array_equal(local.data, np.concatenate(parts).T)


def test_an_indivisible_vocabulary_is_replicated():
    config = replace(BIG, vocab_size=1023, num_layers=1)
    source = RandomSource(config)
    paths, params = load(source, config, range(1), 4)
    place = paths.index("head")
    assert params.specs[place] == jax.sharding.PartitionSpec()
    assert params.leaves[place].addressable_shards[3].data.shape == (1023, 256)


EXPERTS = Experts(5, 2, 72, shared_width=128, dense_layers=(1,))
SPARSE = replace(BIG, family="qwen3_moe", experts=EXPERTS)
CUTS = {
    "experts": SPARSE,
    "llama": BIG,
    "tied": replace(BIG, tie_embeddings=True),
    "odd": replace(BIG, vocab_size=1023, num_heads=9, num_kv_heads=3),
    "biased": replace(BIG, qk_norm=True, qkv_bias=True, o_bias=True, mlp_bias=True),
}


@pytest.mark.parametrize("tp", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("config", CUTS.values(), ids=CUTS)
def test_the_arithmetic_of_a_model_counts_the_matrices_that_a_shard_loads(config: ModelConfig, tp: int):
    """Of every stage; norms and biases are not counted. At TP 8 each of the four KV heads is on two shards."""
    for layers in (range(4), range(2), range(2, 4)):
        leaves = abstract_stage_params(StageSpec(config, layers, mesh_of(tp), jnp.float32)).leaves
        held = sum(prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves if leaf.ndim > 1)
        assert Shard(config, layers, tp, 4, 4).held_bytes == 4 * held


def test_one_device_sums_over_no_axis_and_its_leaves_lie_there_alone():
    params = load_stage(RandomSource(BIG), StageSpec(BIG, range(2), mesh_of(1, first=3), jnp.float32))
    assert {leaf.sharding for leaf in params.leaves} == {jax.sharding.SingleDeviceSharding(jax.devices()[3])}
    assert params.merge(params.leaves).head_cut.axes == ()


def test_a_bf16_checkpoint_loads_as_f32_or_as_it_is():
    config, source = read_config(ROOT / "mistral"), HFSource(ROOT / "mistral")
    for dtype in (jnp.float32, jnp.bfloat16):
        params = load_stage(source, StageSpec(config, range(4), mesh_of(2), dtype))
        assert {leaf.dtype for leaf in params.leaves} == {jnp.dtype(dtype)}


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_each_shard_reads_only_its_own_slices(tp: int):
    source = Counted(RandomSource(BIG))
    _, params = load(source, BIG, range(1, 3), tp)
    local_bytes = sum(leaf.addressable_shards[0].data.nbytes for leaf in params.leaves)
    assert sum(source.sizes) <= tp * local_bytes
    assert max(source.sizes) == BIG.hidden_size * BIG.intermediate_size * 4 // tp


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_each_shard_reads_only_its_own_experts(tp: int):
    source = Counted(RandomSource(SPARSE))
    paths, params = load(source, SPARSE, range(2, 3), tp)
    held = params.leaves[paths.index("layers.0.mlp.gate_up")]
    assert held.addressable_shards[0].data.shape == (-(-5 // tp), 256, 2 * 72)  # [in, out], as `load` asks for
    experts = 5 * 3 * 72 * 256 * 4
    assert sum(size for size in source.sizes if size == 72 * 256 * 4) == experts
    padding = [not np.any(shard.data[place]) for shard in held.addressable_shards for place in range(-(-5 // tp))]
    assert padding == [False] * 5 + [True] * (len(padding) - 5)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_random_weights_are_the_same_in_every_cut(family: str):
    config = replace(read_config(ROOT / family), num_layers=2)
    experts = replace(config.experts, dense_layers=()) if config.experts else None
    check_random_weights(replace(config, layer_windows=(), experts=experts))


def test_random_dense_weights_are_the_same_in_every_cut():
    check_random_weights(replace(BIG, num_heads=9, num_kv_heads=3, num_layers=2))


def check_random_weights(config: ModelConfig) -> None:
    whole = reassembled(RandomSource(config, seed=7), config, 1, 1, True)
    cut = reassembled(RandomSource(config, seed=7), config, 4, 2, True)
    assert whole.keys() == cut.keys()
    assert all((whole[name] == cut[name]).all() for name in whole)
    other = reassembled(RandomSource(config, seed=8), config, 1, 1, True)
    assert (whole["lm_head.weight"] != other["lm_head.weight"]).any()


def test_random_weights_need_only_a_config(tmp_path: Path):
    (tmp_path / "config.json").write_bytes((ROOT / "qwen3" / "config.json").read_bytes())
    config = read_config(tmp_path)
    params = load_stage(open_source(tmp_path, "random", config), StageSpec(config, range(4), mesh_of(2), jnp.float32))
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in params.leaves)


def test_a_shard_that_is_padding_alone_reads_no_heads_and_is_zeros():
    """Three KV heads on four shards: the last one has none, and no query head either."""
    config = replace(BIG, num_heads=9, num_kv_heads=3, num_layers=1, qkv_bias=True, sinks=True)
    source = Counted(RandomSource(config))
    paths, params = load(source, config, range(1), 4)
    for path, width in (("attention.qkv.kernel", 5 * 32), ("attention.qkv.bias", 5 * 32), ("attention.sinks", 3)):
        *held, last = [
            np.asarray(each.data) for each in params.leaves[paths.index(f"layers.0.{path}")].addressable_shards
        ]
        assert last.shape[-1] == width and not last.any() and all(each.any() for each in held)
    out = params.leaves[paths.index("layers.0.attention.out.kernel")].addressable_shards[3]
    assert out.data.shape == (3 * 32, 256) and not np.asarray(out.data).any()


def copy_with(tmp_path: Path, **changed: np.ndarray | None) -> HFSource:
    """The mistral fixture's weights with tensors replaced, or dropped where None."""
    tensors = load_file(ROOT / "mistral" / "model.safetensors") | changed
    save_file({name: each for name, each in tensors.items() if each is not None}, tmp_path / "model.safetensors")
    return HFSource(tmp_path)


def test_a_missing_tensor_is_named_with_its_folder(tmp_path: Path):
    source = copy_with(tmp_path, **{"model.layers.2.mlp.up_proj.weight": None})
    with pytest.raises(MissingTensor, match=rf"model\.layers\.2\.mlp\.up_proj\.weight is not in {tmp_path}"):
        check_tensors(source, read_config(ROOT / "mistral"))


def test_a_stage_does_not_miss_the_tensors_of_other_stages(tmp_path: Path):
    source = copy_with(tmp_path, **{"model.layers.2.mlp.up_proj.weight": None, "lm_head.weight": None})
    params = load_stage(source, StageSpec(read_config(ROOT / "mistral"), range(2), mesh_of(1), jnp.float32))
    assert params.num_bytes > 0


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path: Path):
    name = "model.layers.0.self_attn.k_proj.weight"
    source = copy_with(tmp_path, **{name: np.zeros((16, 64), ml_dtypes.bfloat16)})
    with pytest.raises(WrongShape, match=rf"{name}.*\(16, 64\).*\(32, 64\)"):
        load_stage(source, StageSpec(read_config(ROOT / "mistral"), range(4), mesh_of(1), jnp.float32))


def test_a_folder_without_weights_says_what_would_work(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors in .*--load_format=random"):
        HFSource(tmp_path)


def test_an_index_that_names_an_absent_file_is_refused(tmp_path: Path):
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors"):
        HFSource(tmp_path).shape("model.norm.weight")


def test_a_damaged_file_is_refused(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0notjson!")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        HFSource(tmp_path)
