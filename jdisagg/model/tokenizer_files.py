"""What a tokenizer is made of, wherever it lies: the files of a Hugging Face folder, or a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from jdisagg.core.errors import CheckpointError
from jdisagg.model.chat_template import find_templates
from jdisagg.model.files import Fields, Json, first_line, read_json, shown
from jdisagg.model.gguf_config import generation_defaults
from jdisagg.model.gguf_file import is_gguf, read_gguf
from jdisagg.model.gguf_tokenizer import build_tokenizer, chat_templates, named_tokens
from jdisagg.model.hf_config import read_generation_config

TOKENIZER_BYTES = 512 << 20  # of a tokenizer.json; the largest public ones have some 35 MB


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """As they were found, of one model."""

    raw: tokenizers.Tokenizer
    named: Mapping[str, str]  # `bos_token`, `eos_token` and the like
    templates: Mapping[str, str]
    end_ids: tuple[int, ...]  # that end an answer by the model's word, beside `eos_token`


def read_tokenizer(place: Path) -> TokenizerFiles:
    """Of a folder (`tokenizer.json`; the other files are optional) or of a GGUF file. Raises `CheckpointError`."""
    if is_gguf(place):
        file = read_gguf(place)
        ends = generation_defaults(file).eos_ids
        return TokenizerFiles(build_tokenizer(file), named_tokens(file), chat_templates(file), ends)
    raw = _read_json_tokenizer(place / "tokenizer.json")
    config = _optional(place / "tokenizer_config.json")
    named = _special_tokens(_optional(place / "special_tokens_map.json")) | _special_tokens(config)
    ends = read_generation_config(place).eos_ids if (place / "config.json").exists() else ()
    return TokenizerFiles(raw, named, find_templates(place, config), ends)


def _optional(path: Path) -> Json:
    return read_json(path) if path.exists() else {}


def _read_json_tokenizer(path: Path) -> tokenizers.Tokenizer:
    if not path.exists():
        raise CheckpointError(f"no {path.name} in {path.parent}")
    _refuse_broken_merges(path)
    try:
        raw = tokenizers.Tokenizer.from_file(str(path))
        raw.no_truncation()
        raw.no_padding()
        raw.encode_batch_fast(["a"])  # what only use finds out
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the Rust side raises bare Exception, and where it panics a BaseException
        raise CheckpointError(f"cannot read {path}: {first_line(error)}") from error
    return raw


def _refuse_broken_merges(path: Path) -> None:
    """A prefix that merged tokens do not have makes `tokenizers` 0.23 read beyond a string and end the process."""
    model = Fields(read_json(path, TOKENIZER_BYTES), str(path)).part("model")
    prefix = model.word("continuing_subword_prefix") if model is not None else None
    if model is None or not prefix:
        return
    merges = model.raw.get("merges")
    for merge in merges if isinstance(merges, list) else []:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not (isinstance(parts, list) and str(parts[-1:][0] if parts else "").startswith(prefix)):
            raise model.wrong("continuing_subword_prefix", f"what all second parts begin with; {shown(merge)} does not")


def _special_tokens(config: Json) -> dict[str, str]:
    """`bos_token`, `eos_token` and the like, each written as a string or as {"content": ...}."""
    named = {key: value for key, value in config.items() if key.endswith("_token") and value}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    return {key: value for key, value in texts.items() if isinstance(value, str)}
