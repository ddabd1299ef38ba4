"""The exported folder: every tensor is the model's own, and both spellings of the configuration are there."""

import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import jinja2
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from jdisagg.core.errors import UnsupportedModel
from jdisagg.model.network import Attention
from jdisagg.training.data import CHAT_TEMPLATE, ChatSample, as_chat, make_tokenizer
from jdisagg.training.run import TrainSettings, export, model_config_json, rounded
from jdisagg.training.step import new_network


@pytest.fixture
def tokenizer() -> Tokenizer:
    return make_tokenizer(["def f(x):\n    return x\n"], 320)


def _fused(parts: tuple[str, ...], tensors: dict[str, np.ndarray]) -> np.ndarray:
    """One of layer 1's fused matrices [in, out], joined again from the exported parts."""
    return np.concatenate([tensors[f"model.layers.1.{part}.weight"].T for part in parts], axis=1)


def test_exported_tensors_equal_the_models(untied: TrainSettings, tokenizer: Tokenizer, tmp_path: Path) -> None:
    network = new_network(untied.model, seed=1)
    model = network.merge(rounded(network.leaves))
    export(tmp_path, network.merge(network.leaves), tokenizer)
    tensors = {name: tensor.astype(np.float32) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    layer = model.layers[1]
    assert model.embed is not None and model.head is not None and model.norm is not None
    assert isinstance(layer.attention, Attention) and layer.attention_norm is not None and layer.mlp_norm is not None
    for exported, own in [
        (tensors["model.embed_tokens.weight"], model.embed),
        (tensors["lm_head.weight"], model.head),
        (tensors["model.norm.weight"], model.norm.scale),
        (_fused(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), tensors), layer.attention.qkv.kernel),
        (_fused(("mlp.gate_proj", "mlp.up_proj"), tensors), layer.mlp.gate_up.kernel),
        (tensors["model.layers.1.self_attn.o_proj.weight"].T, layer.attention.out.kernel),
        (tensors["model.layers.1.mlp.down_proj.weight"].T, layer.mlp.down.kernel),
        (tensors["model.layers.1.input_layernorm.weight"], layer.attention_norm.scale),
        (tensors["model.layers.1.post_attention_layernorm.weight"], layer.mlp_norm.scale),
    ]:
        assert np.array_equal(exported, np.asarray(own[...]))
    assert len(tensors) == 3 + 9 * untied.model.num_layers
    assert sum(tensor.size for tensor in tensors.values()) == sum(leaf.size for leaf in network.leaves)


def test_files_hold_bf16_and_a_tied_head_only_once(
    settings: TrainSettings, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    network = new_network(settings.model, seed=1)
    export(tmp_path, network.merge(network.leaves), tokenizer)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"bfloat16"}
    assert "lm_head.weight" not in tensors
    assert tensors["model.layers.0.self_attn.k_proj.weight"].shape == (2 * 8, 32)


def test_the_configuration_has_old_and_new_spellings(settings: TrainSettings, tokenizer: Tokenizer) -> None:
    config = model_config_json(settings.model, tokenizer)
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10_000.0
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"
    assert config["architectures"] == ["LlamaForCausalLM"] and config["tie_word_embeddings"] is True
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (0, 0, 3)


def test_the_chat_template_writes_what_the_lessons_taught(
    settings: TrainSettings, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    network = new_network(settings.model, seed=1)
    export(tmp_path, network.merge(network.leaves), tokenizer)
    template = json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"]
    assert template == CHAT_TEMPLATE
    chat = [{"role": "user", "content": "Write f."}, {"role": "assistant", "content": "def f(): ...\n"}]
    assert jinja2.Template(template).render(messages=chat) == as_chat(ChatSample("Write f.", "def f(): ...\n"))
    asked = jinja2.Template(template).render(messages=chat[:1], add_generation_prompt=True)
    assert as_chat(ChatSample("Write f.", "def f(): ...\n")).startswith(asked)


def test_the_exported_tokenizer_reads_back_the_same(
    settings: TrainSettings, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    network = new_network(settings.model, seed=1)
    export(tmp_path, network.merge(network.leaves), tokenizer)
    again = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert again.encode("return x<|im_end|>").ids == tokenizer.encode("return x<|im_end|>").ids
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [0, 2]


def test_rounding_is_what_bf16_storage_does() -> None:
    leaves = rounded([jnp.asarray([1.0, 1.001, 3.14159])])
    assert leaves[0].tolist() == [1.0, 1.0, 3.140625]


def test_a_model_that_llama_cannot_say_is_refused(
    settings: TrainSettings, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    windowed = replace(settings.model, layer_windows=(32, None))
    network = new_network(windowed, seed=1)
    with pytest.raises(UnsupportedModel, match="a llama checkpoint cannot say all of"):
        export(tmp_path, network.merge(network.leaves), tokenizer)
    assert not list(tmp_path.iterdir())
