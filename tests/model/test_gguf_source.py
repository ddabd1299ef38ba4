"""GGUF weights against what `transformers` computes from the same file, and against the safetensors they are of."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from jdisagg.commands.convert import convert
from jdisagg.core.model_config import ModelConfig
from jdisagg.model.checkpoint import open_source, read_defaults, read_model
from jdisagg.model.gguf.config import READ
from jdisagg.model.gguf.source import GGUFSource
from jdisagg.model.hf_config import read_config
from jdisagg.model.names import stage_leaves
from jdisagg.model.network import forward
from jdisagg.model.params import StageSpec, check_tensors, load_stage
from jdisagg.model.rope import inverse_frequencies
from jdisagg.model.sources import HFSource
from jdisagg.model.tokenizer import Tokenizer
from tests.fixtures.conformance import families, load
from tests.fixtures.gguf_files import FAMILIES, QUANTISED, byte_level, expected, sha256, write
from tests.model.sharded import mesh_of, run_stage, split_layers, stage_output

LENGTH = 64
OWN = {  # what our numbers are called in a file
    "context_length": "max_position",
    "embedding_length": "hidden_size",
    "block_count": "num_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_heads",
    "attention.head_count_kv": "num_kv_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}


def padded(tokens: list[int]) -> np.ndarray:
    return np.array(tokens + [0] * (LENGTH - len(tokens)), np.int32)


def whole_model(place: Path) -> Callable[[list[int]], np.ndarray]:
    config = read_model(place)
    params = load_stage(
        open_source(place, "hf", config), StageSpec(config, range(config.num_layers), mesh_of(1), jnp.float32)
    )
    program = jax.jit(lambda leaves, tokens: forward(params.merge(leaves), tokens))
    return lambda tokens: np.asarray(program(params.leaves, padded(tokens)[None]))[0, : len(tokens)]


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter stores the rows of q and k of a Llama."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def gguf_of(folder: Path, path: Path, kind: Kind = Kind.F32, **options) -> Path:
    """The model of a conformance folder as a file, as llama.cpp's converter writes it."""
    config, source = read_config(folder), HFSource(folder)
    arch = "llama" if config.family in ("llama", "mistral") else config.family
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_layers)

    def tensors():
        for name in source.names:
            found = source.read(name, tuple(slice(0, size) for size in source.shape(name) or ())).astype(np.float32)
            for letter, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
                if arch == "llama" and f".{letter}_proj." in name:
                    found = interleaved(found, heads)
            if config.norm_offset and name.endswith("norm.weight"):
                found = found + np.float32(config.norm_offset)
            stored = kind if found.ndim == 2 else Kind.F32
            yield table.get_name(name, (".weight", ".bias")) or "", gguf.quantize(found, stored), stored
        if config.rope_scaling is not None and config.rope_scaling.kind == "longrope":
            yield "rope_factors_short.weight", np.array(config.rope_scaling.factors, np.float32), Kind.F32
        if config.rope_scaling is not None and config.rope_scaling.kind == "llama3":
            factors = inverse_frequencies(replace(config, rope_scaling=None)) / inverse_frequencies(config)
            yield "rope_freqs.weight", factors.astype(np.float32), Kind.F32

    numbers = {key: getattr(config, name) for key, name in OWN.items()}
    if config.layer_windows:
        numbers["attention.sliding_window"] = config.window(0) or 0
    numbers |= own_numbers(config)

    def more(writer: gguf.GGUFWriter) -> None:
        scaling = config.rope_scaling
        if config.family == "gemma3":
            writer.add_sliding_window_pattern([window is not None for window in config.layer_windows])
        if scaling is not None and scaling.kind in ("linear", "yarn"):
            writer.add_rope_scaling_type(gguf.RopeScalingType(scaling.kind))
            writer.add_rope_scaling_factor(scaling.factor)
            writer.add_rope_scaling_orig_ctx_len(scaling.original_max_position)

    return write(path, arch, numbers, tensors(), byte_level(), more, **options)


def own_numbers(config: ModelConfig) -> dict[str, int | float]:
    """Keys that some architectures have."""
    found: dict[str, int | float | None] = {
        "attn_logit_softcapping": config.attention_soft_cap,
        "final_logit_softcapping": config.final_soft_cap,
        "attention.scale": config.query_scale,
        "rope.freq_base_swa": config.local_rope_theta,
        "rope.dimension_count": config.rotary_dim or None,
    }
    if config.rope_scaling is not None and config.rope_scaling.kind == "longrope":
        found["rope.scaling.original_context_length"] = config.rope_scaling.original_max_position
        found["rope.scaling.attn_factor"] = config.rope_scaling.attention_factor
    return {key: value for key, value in found.items() if value is not None}


def is_dense(name: str) -> bool:
    """Of a family whose files are read, without experts and latents: those are in test_gguf_experts.py."""
    config = read_config(load(name).folder)
    return config.family in READ and config.experts is None and config.latent is None


FILES = QUANTISED | FAMILIES


@pytest.fixture(scope="module", params=sorted(FILES))
def quantised(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("quantised") / f"{request.param}.gguf"
    return FILES[request.param].write(path), expected(request.param)


def test_the_files_are_those_that_transformers_read(quantised):
    path, said = quantised
    assert sha256(path) == said.sha256, "run tests/fixtures/make_gguf.py"


def test_logits_and_greedy_tokens_of_quantised_files_equal_those_of_transformers(quantised):
    path, said = quantised
    model = whole_model(path)
    for prompt, logits, greedy in zip(said.prompts, said.logits, said.greedy, strict=True):
        assert np.abs(model(prompt) - logits).max() <= 1e-3
        tokens = list(prompt)
        for _ in greedy:
            tokens.append(int(model(tokens)[-1].argmax()))
        assert tokens[len(prompt) :] == greedy


@pytest.mark.parametrize("family", [each for each in families() if is_dense(each)])
def test_a_file_in_f32_is_the_folder_that_it_was_made_of(family, tmp_path):
    fixture = load(family)
    path = gguf_of(fixture.folder, tmp_path / "model.gguf")
    config, source = read_model(path), GGUFSource(path)
    ours = read_config(fixture.folder)
    stored = {"rms_norm_eps": config.rms_norm_eps, "rope_scaling": config.rope_scaling}  # as f32, and as frequencies
    assert replace(ours, **stored) == config and np.isclose(ours.rms_norm_eps, config.rms_norm_eps)
    assert np.allclose(inverse_frequencies(ours), inverse_frequencies(config))
    check_tensors(source, config)
    model = whole_model(path)
    for prompt, logits in zip(fixture.prompts, fixture.logits, strict=True):
        assert np.abs(model(prompt) - logits).max() <= 1e-4


@pytest.mark.parametrize(("tp", "pp"), [(2, 2), (4, 1)])
@pytest.mark.parametrize("family", ["llama3", "qwen2"])
def test_shards_of_a_file_in_a_row_give_the_same_logits(family, tp, pp, tmp_path):
    fixture = load(family)
    path = gguf_of(fixture.folder, tmp_path / "model.gguf")
    config, source = read_model(path), GGUFSource(path)
    stages = [
        (load_stage(source, StageSpec(config, run, mesh_of(tp), jnp.float32))) for run in split_layers(config, pp)
    ]
    x = padded(fixture.prompts[1])
    for params in stages:
        x = run_stage(params, mesh_of(tp), stage_output, x)
    assert np.abs(x[: len(fixture.prompts[1])] - fixture.logits[1]).max() <= 1e-4


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_shards_of_a_quantised_file_of_another_family_give_its_logits(family, tmp_path):
    path, said = FAMILIES[family].write(tmp_path / "model.gguf"), expected(family)
    config = read_model(path)
    params = load_stage(GGUFSource(path), StageSpec(config, range(config.num_layers), mesh_of(2), jnp.float32))
    logits = run_stage(params, mesh_of(2), stage_output, padded(said.prompts[1]))
    assert np.abs(logits[: len(said.prompts[1])] - said.logits[1]).max() <= 1e-3


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_queries_of_the_largest_gemmas_are_scaled_by_another_number(architecture, layers, tmp_path):
    tiny = FAMILIES[architecture]
    assert read_model(tiny.write(tmp_path / "small.gguf")).query_scale == 256**-0.5
    large = tiny.write(tmp_path / "large.gguf", numbers=tiny.numbers | {"block_count": layers})
    assert read_model(large).query_scale == 16**-0.5


def test_a_gemma3_file_that_names_no_window_has_none(tmp_path):
    tiny = FAMILIES["gemma3"]
    numbers = {key: value for key, value in tiny.numbers.items() if key != "attention.sliding_window"}
    assert read_model(tiny.write(tmp_path / "full.gguf", numbers=numbers)).layer_windows == ()
    assert read_model(tiny.write(tmp_path / "some.gguf")).layer_windows == (*[16] * 5, None, 16)


@pytest.mark.parametrize(("heads", "hidden", "rotated"), [(4, 64, 10), (2, 88, 30), (2, 156, 62)])
def test_a_phi3_file_rotates_as_many_numbers_as_it_says(heads, hidden, rotated, tmp_path):
    """Though the share of a head, in floating point, times the head is less than them for some."""
    tiny = replace(FAMILIES["phi3"], heads=heads, hidden=hidden, kinds=(Kind.F16,))
    numbers = tiny.numbers | {"rope.dimension_count": rotated}
    assert read_model(tiny.write(tmp_path / "model.gguf", numbers=numbers)).rotary_dim == rotated


def test_a_slice_is_the_same_as_the_slice_of_the_whole(tmp_path):
    """Of all kinds, of permuted rows, and of columns that begin and end inside a block."""
    source = GGUFSource(QUANTISED["llama"].write(tmp_path / "model.gguf"))
    for name in source.names:
        shape = source.shape(name)
        assert shape is not None and source.dtype(name) == "float32"
        whole = source.read(name, tuple(slice(0, size) for size in shape))
        index = (slice(32, 96), slice(40, 150))[: len(shape)]
        part = source.read(name, index)
        assert part.dtype == np.float32 and np.array_equal(part, whole[index]), name


def test_a_slice_reads_its_own_rows_only(tmp_path, monkeypatch):
    source, seen = GGUFSource(QUANTISED["llama"].write(tmp_path / "model.gguf")), []
    dequantize = gguf.quants.dequantize
    monkeypatch.setattr(
        "jdisagg.model.gguf.file.dequantize", lambda data, kind: seen.append(data.size) or dequantize(data, kind)
    )
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight"):
        seen.clear()
        rows, columns = source.shape(name) or (0, 0)
        source.read(name, (slice(0, 32), slice(0, columns)))
        part = sum(seen)
        source.read(name, (slice(0, rows), slice(0, columns)))
        assert part * rows == (sum(seen) - part) * 32


def test_files_of_several_parts_are_one_model(tmp_path):
    whole = QUANTISED["qwen2"].write(tmp_path / "whole.gguf")
    QUANTISED["qwen2"].write(tmp_path / "part.gguf", split_max_tensors=9)
    parts = sorted(tmp_path.glob("part-*-of-*.gguf"))
    assert len(parts) == 3
    one = GGUFSource(whole)
    for path in (parts[0], parts[2]):
        several = GGUFSource(path)
        assert several.names == one.names and read_model(path) == read_model(whole)
        for name in one.names:
            index = tuple(slice(0, size) for size in one.shape(name) or ())
            assert np.array_equal(one.read(name, index), several.read(name, index))
    assert Tokenizer(parts[1]).encode("the dog") == Tokenizer(whole).encode("the dog")


@pytest.mark.parametrize("fmt", ["orbax", "hf"])
@pytest.mark.parametrize("name", sorted(FILES))
def test_a_converted_file_is_the_same_model(name, fmt, tmp_path):
    path, folder = FILES[name].write(tmp_path / "model.gguf"), tmp_path / "folder"
    convert(path, folder, fmt, None)
    config, stored = read_model(folder), GGUFSource(path)
    assert config == read_model(path) and read_defaults(folder) == read_defaults(path)
    source = open_source(folder, fmt, config)
    for leaf in stage_leaves(config, range(config.num_layers), 1).values():
        for part in leaf.parts:
            if stored.shape(part.name) is not None:
                assert np.array_equal(
                    source.read(part.name, part.index(0, 1)), stored.read(part.name, part.index(0, 1))
                )
    ours, theirs = Tokenizer(folder), Tokenizer(path)
    messages, text = [{"role": "user", "content": "Grüße"}], "the dog, 世界"
    assert ours.chat(messages) == theirs.chat(messages) and ours.encode(text) == theirs.encode(text)
    assert (ours.eos_ids, ours.bos_id) == (theirs.eos_ids, theirs.bos_id)
