"""`config.json` in every spelling, and refusals that name what they refuse."""

import json
from pathlib import Path
from typing import Any

import pytest

from jdisagg.core.errors import CheckpointError, UnsupportedModel
from jdisagg.core.model_config import RopeScaling
from jdisagg.model.export import config_json
from jdisagg.model.hf_config import parse_config, read_config, read_generation_config
from tests.fixtures.conformance import ROOT, families

SIZES = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def raw(architecture: str = "LlamaForCausalLM", **more: Any) -> dict[str, Any]:
    return {"architectures": [architecture], **SIZES, **more}


def write(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
def test_the_old_and_the_new_spelling_read_equal(kind: str):
    scaling = {"default": {}, "linear": {"factor": 2.0}, "llama3": LLAMA3}[kind]
    old = raw(rope_theta=5e5, rope_scaling={"type": kind, **scaling} if scaling else None, torch_dtype="bfloat16")
    new = raw(rope_parameters={"rope_type": kind, "rope_theta": 5e5, **scaling}, dtype="bfloat16")
    assert parse_config(old) == parse_config(new)
    assert parse_config(new).rope_theta == 5e5


def test_llama3_scaling_is_read_with_all_its_factors():
    config = parse_config(raw(rope_scaling={"rope_type": "llama3", **LLAMA3}))
    assert config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


def test_what_a_llama_leaves_out_has_the_value_transformers_gives_it():
    config = parse_config(raw())
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (8, 8, 10_000.0)
    assert (config.rms_norm_eps, config.max_position, config.tie_embeddings) == (1e-6, 2048, False)
    assert not (config.qkv_bias or config.o_bias or config.mlp_bias or config.qk_norm or config.layer_windows)


def test_each_family_has_its_own_biases_and_norms():
    heads = {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}
    flags = {
        name: (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm)
        for name in ("Llama", "Mistral", "Qwen2", "Qwen3")
        for config in [parse_config(raw(f"{name}ForCausalLM", **heads))]
    }
    assert flags == {
        "Llama": (True, True, True, False),
        "Mistral": (False, False, False, False),
        "Qwen2": (True, False, False, False),
        "Qwen3": (True, True, False, True),
    }


@pytest.mark.parametrize(
    ("more", "windows"),
    [
        ({"sliding_window": 16}, (16, 16, 16, 16)),
        ({"sliding_window": None}, ()),
        ({}, (4096,) * 4),
    ],
)
def test_mistral_slides_in_every_layer(more: dict[str, Any], windows: tuple):
    assert parse_config(raw("MistralForCausalLM", **more)).layer_windows == windows


@pytest.mark.parametrize("family", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize(
    ("more", "windows"),
    [
        ({"use_sliding_window": False, "max_window_layers": 1}, ()),
        ({"use_sliding_window": True, "max_window_layers": 1}, (None, 16, 16, 16)),
        ({"use_sliding_window": True, "max_window_layers": 9}, ()),
        (
            {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 2},
            (16, None, 16, None),
        ),
    ],
)
def test_qwen_slides_where_its_config_says(family: str, more: dict[str, Any], windows: tuple):
    assert parse_config(raw(family, sliding_window=16, num_key_value_heads=4, **more)).layer_windows == windows


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (raw("GPT2LMHeadModel"), ["GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
        ({**SIZES, "model_type": "bert"}, ["none named", "bert"]),
        (raw(hidden_act="gelu"), ["hidden_act 'gelu'", "silu"]),
        (raw(rope_scaling={"rope_type": "dynamic", "factor": 2}), ["'dynamic'", "default, linear, llama3"]),
        (raw(rope_parameters={"rope_type": "llama3", "factor": 2}), ["low_freq_factor", "high_freq_factor"]),
        (raw(rope_parameters={"full_attention": {"rope_type": "default"}}), ["full_attention"]),
        (raw(partial_rotary_factor=0.5), ["partial_rotary_factor 0.5"]),
        (raw(quantization_config={"quant_method": "bitsandbytes"}), ["'bitsandbytes'", "awq, gptq, mxfp4"]),
        (raw(num_hidden_layers=0), ["num_hidden_layers = 0"]),
        (raw(vocab_size=None), ["vocab_size = None"]),
        (raw("MistralForCausalLM", layer_types=["chunked_attention"] * 4), ["chunked_attention", "sliding_attention"]),
        (raw("MistralForCausalLM", layer_types=["full_attention"] * 3), ["3 layers", "for 4 layers"]),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(config: dict[str, Any], named: list[str]):
    with pytest.raises(UnsupportedModel) as caught:
        parse_config(config)
    assert all(each in str(caught.value) for each in named)


def test_a_folder_without_a_config_is_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        read_config(tmp_path)


def test_a_config_that_is_not_json_is_named(tmp_path: Path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not JSON"):
        read_config(tmp_path)


def test_the_generation_config_wins_over_the_models_end_token(tmp_path: Path):
    write(tmp_path, raw(eos_token_id=2), {"eos_token_id": [7, 8], "do_sample": True, "temperature": 0.6, "top_k": 20})
    defaults = read_generation_config(tmp_path)
    assert defaults.eos_ids == (7, 8)
    assert defaults.sampling == {"temperature": 0.6, "top_k": 20}


def test_a_generation_config_that_turns_sampling_off_means_greedy(tmp_path: Path):
    write(tmp_path, raw(), {"do_sample": False, "temperature": 0.6})
    assert read_generation_config(tmp_path).sampling == {"temperature": 0.0}


def test_without_a_generation_config_the_models_end_token_counts_and_nothing_is_sampled_differently(tmp_path: Path):
    defaults = read_generation_config(write(tmp_path, raw(eos_token_id=2, bos_token_id=1)))
    assert (defaults.eos_ids, defaults.bos_id, defaults.sampling) == ((2,), 1, {})


@pytest.mark.parametrize("family", families())
def test_a_written_config_reads_back_as_the_same_numbers(family: str):
    config = read_config(ROOT / family)
    assert parse_config(config_json(config, "float32")) == config


DEEPSEEK = {"num_experts_per_tok": 6, "n_routed_experts": 160, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    ("version", "more", "named"),
    [
        (2, {"norm_topk_prob": True}, ["norm_topk_prob = True", "false"]),
        (2, {"topk_method": "noaux_tc"}, ["'noaux_tc'", "group_limited_greedy"]),
        (2, {"moe_layer_freq": 2}, ["moe_layer_freq = 2"]),
        (3, {"scoring_func": "softmax"}, ["'softmax'", "sigmoid"]),
        (3, {"n_group": 7}, ["n_group = 7", "160"]),
        (3, {"n_group": 160, "topk_group": 5}, ["n_group = 160", "hold 6"]),
    ],
)
def test_routing_that_deepseek_is_not_computed_by_is_refused(version: int, more: dict[str, Any], named: list[str]):
    with pytest.raises(UnsupportedModel) as caught:
        parse_config(raw(f"DeepseekV{version}ForCausalLM", **DEEPSEEK, **more))
    assert all(each in str(caught.value) for each in named)


def test_deepseek_v3_has_the_published_numbers_of_weights():
    """671 B in all and 37 B for a token (DeepSeek-V3, 2024, abstract), of what transformers assumes of a bare file."""
    sizes = {"vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432, "num_hidden_layers": 61}
    config = parse_config({**raw("DeepseekV3ForCausalLM"), **sizes, "num_attention_heads": 128})
    assert config.num_params() / 1e9 == pytest.approx(671, rel=0.01)
    assert config.num_active_params() / 1e9 == pytest.approx(37, rel=0.03)
