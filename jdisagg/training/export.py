"""Writes a trained model as a Hugging Face folder in bf16, in spellings that transformers 4 and 5 both read."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax import Array
from safetensors.numpy import save
from tokenizers import Tokenizer

from jdisagg.core.errors import UnsupportedModel
from jdisagg.core.model_config import ModelConfig
from jdisagg.model.network import Layer, Stage
from jdisagg.training.step import Leaves
from jdisagg.training.tokenizer import CHAT_END, CHAT_START, CHAT_TEMPLATE, END_OF_TEXT, PAD, SPECIALS


def export(folder: Path, model: Stage, tokenizer: Tokenizer) -> None:
    """Writes weights, configuration and tokenizer of a whole (tp = 1) plain Llama model into `folder`."""
    config = model.config
    if config.family != "llama" or config.rope_scaling or config.layer_windows or config.qk_norm or config.qkv_bias:
        raise UnsupportedModel(f"only plain Llama models are exported, not family {config.family} as configured here")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(save(llama_tensors(model), metadata={"format": "pt"}))
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "config.json", llama_config(config, tokenizer))
    _write(folder / "tokenizer_config.json", tokenizer_config(config, tokenizer))
    _write(folder / "generation_config.json", generation_config(tokenizer))


def rounded(leaves: Leaves) -> Leaves:
    """The leaves as a reader of the exported folder gets them: through bf16 and back."""
    return [leaf.astype(jnp.bfloat16).astype(leaf.dtype) for leaf in leaves]


def llama_tensors(model: Stage) -> dict[str, np.ndarray]:
    """Every tensor under its Llama name, matrices as bf16[out, in]."""
    assert model.embed is not None and model.norm is not None, "a whole model has both ends"
    tensors = {"model.embed_tokens.weight": _bf16(model.embed[...]), "model.norm.weight": _bf16(model.norm.scale[...])}
    if model.head is not None:
        tensors["lm_head.weight"] = _bf16(model.head[...])
    for index, layer in enumerate(model.layers):
        for name, tensor in _layer_tensors(layer).items():
            tensors[f"model.layers.{index}.{name}.weight"] = tensor
    return tensors


def _layer_tensors(layer: Layer) -> dict[str, np.ndarray]:
    attention, mlp = layer.attention, layer.mlp
    q_size, kv_size = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    q, k, v = np.split(_transposed(attention.qkv.kernel), [q_size, q_size + kv_size])
    gate, up = np.split(_transposed(mlp.gate_up.kernel), 2)
    return {
        "input_layernorm": _bf16(layer.attention_norm.scale[...]),
        "self_attn.q_proj": q,
        "self_attn.k_proj": k,
        "self_attn.v_proj": v,
        "self_attn.o_proj": _transposed(attention.out.kernel),
        "post_attention_layernorm": _bf16(layer.mlp_norm.scale[...]),
        "mlp.gate_proj": gate,
        "mlp.up_proj": up,
        "mlp.down_proj": _transposed(mlp.down.kernel),
    }


def _transposed(kernel: nnx.Param) -> np.ndarray:
    return np.ascontiguousarray(_bf16(kernel[...]).T)


def _bf16(values: Array) -> np.ndarray:
    return np.asarray(values).astype(ml_dtypes.bfloat16)


def llama_config(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": config.rope_theta,  # transformers 4
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},  # transformers 5
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "pad_token_id": tokenizer.token_to_id(PAD),
    }


def tokenizer_config(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": PAD,
        "additional_special_tokens": [CHAT_START, CHAT_END],
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(text)): {"content": text, **flags} for text in SPECIALS
        },
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_position,
        "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip


def generation_config(tokenizer: Tokenizer) -> dict[str, Any]:
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    return {
        "bos_token_id": end_of_text,
        "eos_token_id": [end_of_text, tokenizer.token_to_id(CHAT_END)],
        "pad_token_id": tokenizer.token_to_id(PAD),
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.95,
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
