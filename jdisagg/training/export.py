"""Writes a trained model as a Hugging Face folder in bf16, tokenizer, chat template and sampling defaults included."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
from tokenizers import Tokenizer

from jdisagg.core.errors import UnsupportedModel
from jdisagg.core.model_config import ModelConfig
from jdisagg.model.export import checkpoint_tensors, config_json, save_hf, write_json
from jdisagg.model.hf_config import parse_config
from jdisagg.model.network import Stage
from jdisagg.training.step import Leaves
from jdisagg.training.tokenizer import CHAT_END, CHAT_START, CHAT_TEMPLATE, END_OF_TEXT, PAD, SPECIALS


def export(folder: Path, model: Stage, tokenizer: Tokenizer) -> None:
    """Writes a whole (tp = 1) model into `folder`. Raises UnsupportedModel where config.json could not say it."""
    config = model_config_json(model.config, tokenizer)
    if parse_config(config) != model.config:
        raise UnsupportedModel(f"a {model.config.family} checkpoint cannot say all of {model.config}")
    folder.mkdir(parents=True, exist_ok=True)
    save_hf(folder, ((name, tensor.astype(ml_dtypes.bfloat16)) for name, tensor in checkpoint_tensors(model)))
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "config.json", config)
    write_json(folder / "tokenizer_config.json", tokenizer_config(model.config, tokenizer))
    write_json(folder / "generation_config.json", generation_config(tokenizer))


def rounded(leaves: Leaves) -> Leaves:
    """The leaves as a reader of the exported folder gets them: through bf16 and back."""
    return [leaf.astype(jnp.bfloat16).astype(leaf.dtype) for leaf in leaves]


def model_config_json(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    pad = tokenizer.token_to_id(PAD)
    return config_json(config, "bfloat16", bos_token_id=end_of_text, eos_token_id=end_of_text, pad_token_id=pad)


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
