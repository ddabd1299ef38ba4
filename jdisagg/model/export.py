"""Writes a model as a Hugging Face folder that `transformers` and this project can read."""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from jdisagg.core.model_config import ModelConfig
from jdisagg.model.families import TABLE
from jdisagg.model.files import regular
from jdisagg.model.names import stage_leaves
from jdisagg.model.network import Stage
from jdisagg.model.params import as_it_lies, dotted, forms_of
from jdisagg.model.quantized.config import KEYS as QUANTIZATION_KEYS
from jdisagg.model.quantized.config import MODELOPT_FILE
from jdisagg.model.rope_config import rope_json
from jdisagg.model.sources import INDEX_FILE

FILE_BYTES = 4 << 30  # a new safetensors file starts beyond this
COMPANIONS = ("*.json", "*.jinja", "additional_chat_templates/*.jinja", "tokenizer.model", "merges.txt", "LICENSE*")
# These files describe shards and quantised weights, which the written folder does not have.
NOT_COPIED = (INDEX_FILE, MODELOPT_FILE, "quantize_config.json", "quant_config.json")
ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}
MODEL_TYPES = {"gemma3": "gemma3_text"}  # model types that differ from the family's name
Tensors = Iterable[tuple[str, np.ndarray]]


def checkpoint_tensors(stage: Stage) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of a whole model on one device, under Hugging Face names and as [out, in]."""
    config = stage.config
    assert stage.embed is not None and stage.norm is not None, "only a whole model makes a checkpoint"
    table, forms = stage_leaves(config, range(config.num_layers), 1), forms_of(stage)
    assert not any(form.is_scaled for form in forms.values()), "rounded matrices are no checkpoint"
    for path, value in jax.tree_util.tree_flatten_with_path(nnx.state(stage))[0]:
        rule = as_it_lies(table[dotted(path)], dotted(path), forms)
        for part, _, piece in rule.cut(np.asarray(value), 0, 1):
            yield part.name, np.ascontiguousarray(piece)


def config_json(config: ModelConfig, dtype: str, **ids: int | list[int] | None) -> dict[str, Any]:
    """Returns a `config.json` that transformers 4 and 5 read; `ids` are token ids such as `eos_token_id=1`."""
    family = next(each for each in TABLE if each.name == config.family)
    rope = rope_json(config.rope_scaling)
    return {
        "architectures": [family.architecture],
        "model_type": MODEL_TYPES.get(family.name, family.name),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": ACTIVATIONS[config.activation],
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope if config.rope_scaling else None,
        "rope_parameters": rope | {"rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.o_bias,
        "mlp_bias": config.mlp_bias,
        **family.written(config),
        "torch_dtype": dtype,
        "dtype": dtype,
        **ids,
    }


def save_hf(folder: Path, tensors: Tensors, file_bytes: int = FILE_BYTES) -> None:
    """Writes safetensors: one file, or several with an index. Host memory holds one file's tensors at a time."""
    parts: list[Path] = []
    place: dict[str, int] = {}
    for batch in _batches(tensors, file_bytes):
        parts.append(folder / f"part-{len(parts)}")
        place |= dict.fromkeys(batch, len(parts) - 1)
        save_file(batch, parts[-1], metadata={"format": "pt"})
    if len(parts) == 1:
        parts[0].rename(folder / "model.safetensors")
        return
    final = [f"model-{i + 1:05}-of-{len(parts):05}.safetensors" for i in range(len(parts))]
    for part, name in zip(parts, final, strict=True):
        part.rename(folder / name)
    index = {"metadata": {}, "weight_map": {name: final[i] for name, i in place.items()}}
    write_json(folder / INDEX_FILE, index)


def _batches(tensors: Tensors, file_bytes: int) -> Iterator[dict[str, np.ndarray]]:
    batch: dict[str, np.ndarray] = {}
    size = 0
    for name, tensor in tensors:
        if batch and size + tensor.nbytes > file_bytes:
            yield batch
            batch, size = {}, 0
        batch[name], size = tensor, size + tensor.nbytes
    yield batch


def copy_companions(source: Path, target: Path, dtype: str | None) -> None:
    """Copies config, tokenizer and template files. The copied config names `dtype`, if given, and no quantisation."""
    found = (path for pattern in COMPANIONS for path in source.glob(pattern))
    for path in (path for path in found if path.name not in NOT_COPIED and not path.is_dir()):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(regular(path), copy)
    original = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config = {key: value for key, value in original.items() if key not in QUANTIZATION_KEYS}
    if dtype is not None:
        config["dtype" if "dtype" in config else "torch_dtype"] = dtype
    if config != original:
        write_json(target / "config.json", config)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes indented JSON in the mapping's order, with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
