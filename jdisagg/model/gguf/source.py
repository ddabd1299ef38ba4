"""Reads the weights and the tokenizer of a GGUF file under Hugging Face names.

Weights are memory-mapped and only the slices that a shard reads are dequantised. Two layouts are undone: for Llama the
rows of q and k are stored in interleaved rotation order, and for Gemma the norm weights include the 1 that the network
adds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from jdisagg.core.errors import CheckpointError, MissingTensor, UnsupportedModel
from jdisagg.core.model_config import ModelConfig
from jdisagg.model.export import config_json, write_json
from jdisagg.model.files import first_line, shown
from jdisagg.model.gguf.config import NO_WEIGHTS, NORMS_PLUS_ONE, generation_defaults, model_config
from jdisagg.model.gguf.file import GGUFFile, GGUFTensor, MappedFiles, has_definition, read_gguf, views_of
from jdisagg.model.names import Index, stage_leaves

CORRECTION = ".e_score_correction_bias"
INTERLEAVED = ("llama",)  # architectures whose q and k rows are in interleaved order


class GGUFSource:
    """Slices of one model's tensors, as float32 whatever the stored type."""

    def __init__(self, path: str | Path) -> None:
        file = read_gguf(path)
        config = model_config(file)
        self._path, self._config = file.path, config
        self._interleaved = file.architecture in INTERLEAVED
        self._norm_offset = np.float32(file.architecture in NORMS_PLUS_ONE)
        names = _names(config, file.architecture)
        self._tensors = {name: file.tensors[stored] for name, stored in names.items() if stored in file.tensors}
        self._views, self._blocks = views_of(file, config), MappedFiles()
        found = [*self._tensors.values(), *(tensor for view in self._views.values() for tensor in view.tensors)]
        self._used = {(tensor.path, tensor.start): tensor for tensor in found}  # without duplicates
        unread = [
            name
            for name, tensor in file.tensors.items()
            if (tensor.path, tensor.start) not in self._used and name not in NO_WEIGHTS
        ]
        if unread:
            raise UnsupportedModel(f"{self.place}: tensor {min(unread)} has no place in a {config.family} model here")

    @property
    def place(self) -> str:
        return str(self._path)

    @property
    def names(self) -> list[str]:
        return sorted(self._tensors.keys() | self._views.keys())

    @property
    def label(self) -> str:
        """Storage format of the weights: the block kinds, by bytes in descending order."""
        kinds = Counter[str]()
        for tensor in self._used.values():
            kinds[tensor.kind.name] += tensor.num_bytes
        return f"gguf of {', '.join(kind for kind, _ in kinds.most_common())}"

    def stored_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self._used.values())

    def num_weights(self) -> int:
        return sum(prod(tensor.shape) for tensor in self._used.values())

    def shape(self, name: str) -> tuple[int, ...] | None:
        found = self._views.get(name) or self._tensors.get(name)
        return None if found is None else found.shape

    def dtype(self, name: str) -> str:
        view = self._views.get(name)
        tensors = (self._tensor(name),) if view is None else view.tensors
        unknown = [tensor.kind.name for tensor in tensors if not has_definition(tensor.kind)]
        return unknown[0] if unknown else "float32"

    def read(self, name: str, index: Index) -> np.ndarray:
        view = self._views.get(name)
        place = self._tensor(name).path if view is None else view.tensors[0].path
        try:
            return self._read(name, index) if view is None else view.read(self._blocks, index)
        except (ValueError, IndexError) as error:
            raise CheckpointError(f"cannot read tensor {name} of {place}: {first_line(error)}") from error

    def _read(self, name: str, index: Index) -> np.ndarray:
        tensor, rows = self._tensors[name], index[0]
        order = self._order(name)
        picked = rows if order is None else order[rows]
        if len(index) > 1:
            return self._blocks.rows(tensor, picked, index[1])
        found = self._blocks.rows(tensor, slice(0, 1), slice(0, prod(tensor.shape)))[0][picked]
        return found - self._norm_offset if name.endswith("norm.weight") else found

    def _tensor(self, name: str) -> GGUFTensor:
        if name not in self._tensors:
            raise MissingTensor(f"tensor {name} is not in {self.place}")
        return self._tensors[name]

    def _order(self, name: str) -> np.ndarray | None:
        """Returns the stored row of each row of the tensor; None if the order is unchanged."""
        heads = {"q_proj": self._config.num_heads, "k_proj": self._config.num_kv_heads}
        projection = name.split(".")[-2]
        if not self._interleaved or projection not in heads:
            return None
        rows = np.arange(self._tensors[name].shape[0])
        return rows.reshape(heads[projection], -1, 2).swapaxes(1, 2).ravel()


def _names(config: ModelConfig, architecture: str) -> dict[str, str]:
    """Returns Hugging Face name -> GGUF name for every tensor that is stored one to one."""
    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    table = get_tensor_name_map(arch, config.num_layers)
    leaves = stage_leaves(config, range(config.num_layers), 1).values()
    parts = {part.name for leaf in leaves for part in leaf.parts if _is_read(config, part.name)}
    named = {name: _own_name(name) or table.get_name(name, (".weight", ".bias")) for name in parts}
    return {name: stored for name, stored in named.items() if stored is not None}


def _own_name(name: str) -> str | None:
    """Returns the GGUF name of a tensor that the package's name table lacks, or None."""
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    if rest.endswith(CORRECTION):
        return f"blk.{layer}.exp_probs_b.bias"
    return f"blk.{layer}.attn_sinks.weight" if rest == "self_attn.sinks" else None


def _is_read(config: ModelConfig, name: str) -> bool:
    """Returns True if the network has the tensor; some families have no biases."""
    if not name.endswith(".bias"):
        return True
    if ".mlp." in name:
        router = config.experts is not None and config.experts.router_bias and name.endswith(".router.bias")
        return config.mlp_bias or router
    return config.o_bias if ".o_proj." in name else config.qkv_bias


# The tokenizer of a GGUF file, built with the `tokenizers` library: byte-level BPE or SentencePiece BPE.
#
# A file only names its pre-tokenizer (`tokenizer.ggml.pre`); the patterns below are those of the named tokenizers. An
# unknown name is refused, because a guess would give almost correct token ids.

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # token types
LONGEST_TOKEN = 1024  # characters; `_joins` tries every split of a token
NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
UNDERSCORE = "\u2581"  # SentencePiece's space

_ENGLISH = "'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = rf"{_ENGLISH}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_WORDS = rf"(?i:{_ENGLISH})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_REST}"
_TEKKEN = rf"{_CASED}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS: dict[str, tuple[str, ...]] = {  # each pattern splits the pieces left by the one before
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "dbrx", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), (_QWEN2,)),
    **dict.fromkeys(("gpt-2", "olmo", "mpt"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), (r"\p{N}", _GPT2)),
    "tekken": (_TEKKEN,),
}
WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "tekken")  # a word in the vocabulary is never split; BOS is added
COMPOSED = ("qwen2",)  # text is normalised to NFC first


def build_tokenizer(file: GGUFFile) -> tokenizers.Tokenizer:
    """Builds the tokenizer. Raises `CheckpointError` or its subclasses, naming the file."""
    kind = file.fields.word("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise UnsupportedModel(
            f"{file.path}: tokenizer {shown(kind)} is not supported; supported: {', '.join(builders)}"
        )
    tokens = _tokens(file)
    try:
        raw = builders[kind](file, tokens)
        raw.add_special_tokens(_added(file, tokens, (CONTROL, UNKNOWN), special=True))
        raw.add_tokens(_added(file, tokens, (USER_DEFINED,), special=False))
        _add_post_processor(raw, file, tokens, kind)
        raw.encode_batch_fast(["a"])  # some errors appear only in use
    except CheckpointError:
        raise
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the Rust side raises bare Exception, and BaseException on panics
        raise CheckpointError(f"{file.path}: its tokenizer cannot be built: {first_line(error)}") from error
    return raw


def named_tokens(file: GGUFFile) -> dict[str, str]:
    """Returns `bos_token`, `eos_token` and so on as variables for a chat template."""
    tokens = _tokens(file)
    found = {name: _id(file, key, len(tokens)) for name, key in NAMED.items()}
    return {name: tokens[number] for name, number in found.items() if number is not None}


def chat_templates(file: GGUFFile) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    keys = [key for key in file.metadata if key == prefix or key.startswith(prefix + ".")]
    return {key[len(prefix) + 1 :] or "default": file.fields.word(key) or "" for key in keys}


def _tokenizer_array(file: GGUFFile, key: str, kinds: tuple[type, ...], length: int | None = None) -> list[Any]:
    """Returns an array of the tokenizer's metadata, checked for `length` if given."""
    name = f"tokenizer.ggml.{key}"
    found = file.metadata.get(name)
    if not isinstance(found, list) or not all(isinstance(each, kinds) for each in found):
        raise file.fields.wrong(name, f"an array of {kinds[0].__name__}")
    if length is not None and len(found) != length:
        raise CheckpointError(f"{file.path}: {name} has {len(found)} entries for {length} tokens")
    return found


def _tokens(file: GGUFFile) -> list[str]:
    tokens = _tokenizer_array(file, "tokens", (str,))
    longest = max(tokens, key=len, default="")
    if len(longest) > LONGEST_TOKEN:
        raise CheckpointError(f"{file.path} has a token of {len(longest)} characters; at most {LONGEST_TOKEN} are read")
    return tokens


def _kinds(file: GGUFFile, tokens: list[str]) -> list[int]:
    if "tokenizer.ggml.token_type" not in file.metadata:
        return [NORMAL] * len(tokens)
    return _tokenizer_array(file, "token_type", (int,), len(tokens))


def _added(file: GGUFFile, tokens: list[str], kinds: tuple[int, ...], *, special: bool) -> list[AddedToken]:
    pairs = zip(tokens, _kinds(file, tokens), strict=True)
    return [AddedToken(token, normalized=False, special=special) for token, kind in pairs if kind in kinds and token]


def _id(file: GGUFFile, key: str, count: int) -> int | None:
    found = file.fields.ids(f"tokenizer.ggml.{key}_token_id", 1, count)
    return found[0] if found else None


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    """Returns token -> id; the first of duplicate tokens counts."""
    return {token: number for number, token in reversed(list(enumerate(tokens)))}


def _byte_level(file: GGUFFile, tokens: list[str]) -> tokenizers.Tokenizer:
    name = file.fields.word("tokenizer.ggml.pre") or "default"
    if name not in PATTERNS:
        raise UnsupportedModel(
            f"{file.path}: tokenizer.ggml.pre = {shown(name)} is not supported; supported: {', '.join(PATTERNS)}"
        )
    merges = [tuple(merge.split(" ")) for merge in _tokenizer_array(file, "merges", (str,))]
    broken = next((merge for merge in merges if len(merge) != 2), None)
    if broken is not None:
        raise CheckpointError(f"{file.path}: merge {shown(' '.join(broken))} is not two tokens with a space between")
    raw = tokenizers.Tokenizer(models.BPE(_vocabulary(tokens), merges, ignore_merges=name in WHOLE_WORDS))
    cuts = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in PATTERNS[name]]
    raw.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(False, use_regex=False)])
    raw.decoder = decoders.ByteLevel()
    if name in COMPOSED:
        raw.normalizer = normalizers.NFC()
    return raw


def _sentencepiece(file: GGUFFile, tokens: list[str]) -> tokenizers.Tokenizer:
    """Builds a BPE that merges the pair whose result has the best score; the remainder becomes bytes."""
    scores = _tokenizer_array(file, "scores", (float, int), len(tokens))
    kinds = _kinds(file, tokens)
    vocabulary, unknown = _vocabulary(tokens), _id(file, "unknown", len(tokens))
    normal = {token: scores[i] for token, i in vocabulary.items() if kinds[i] == NORMAL}
    raw = tokenizers.Tokenizer(
        models.BPE(
            vocabulary,
            [(left, right) for _, _, _, left, right in sorted(_joins(normal), key=lambda join: join[:3], reverse=True)],
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=BYTE in kinds,
        )
    )
    prefixed = (
        file.fields.flag("tokenizer.ggml.add_space_prefix") or "tokenizer.ggml.add_space_prefix" not in file.metadata
    )
    spaces = normalizers.Replace(" ", UNDERSCORE)
    raw.normalizer = normalizers.Sequence([normalizers.Prepend(UNDERSCORE), spaces] if prefixed else [spaces])
    back = [decoders.Replace(UNDERSCORE, " "), decoders.ByteFallback(), decoders.Fuse()]
    raw.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prefixed else back)
    return raw


def _joins(scores: dict[str, float]) -> Iterator[tuple[float, float, float, str, str]]:
    """Yields (score of the whole, of its left part, of its right part, left, right) for every split of every token into
    two tokens."""
    for whole, score in scores.items():
        for cut in range(1, len(whole)):
            left, right = whole[:cut], whole[cut:]
            if left in scores and right in scores:
                yield score, scores[left], scores[right], left, right


def _add_post_processor(raw: tokenizers.Tokenizer, file: GGUFFile, tokens: list[str], kind: str) -> None:
    """Adds the tokens before and after a prompt: by the file's flags, else by llama.cpp's rule for the model type."""
    begins = kind == "llama" or file.fields.word("tokenizer.ggml.pre") in WHOLE_WORDS
    if "tokenizer.ggml.add_bos_token" in file.metadata:
        begins = file.fields.flag("tokenizer.ggml.add_bos_token")
    bos, eos = _id(file, "bos", len(tokens)), _id(file, "eos", len(tokens))
    before = [tokens[bos]] if begins and bos is not None else []
    after = [tokens[eos]] if file.fields.flag("tokenizer.ggml.add_eos_token") and eos is not None else []
    if before or after:
        vocabulary = _vocabulary(tokens)
        raw.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], special_tokens=[(token, vocabulary[token]) for token in {*before, *after}]
        )


# Export of the metadata as the JSON files of a Hugging Face folder.


def write_companions(place: Path, target: Path, dtype: str) -> None:
    """Writes config, generation config, tokenizer and templates of the GGUF file `place` to the folder `target`."""
    file = read_gguf(place)
    defaults, templates = generation_defaults(file), chat_templates(file)
    ids = {"bos_token_id": defaults.bos_id, "eos_token_id": list(defaults.eos_ids) or None}
    write_json(target / "config.json", config_json(model_config(file), dtype, **ids))
    write_json(target / "generation_config.json", {**ids, **defaults.sampling})
    (target / "tokenizer.json").write_text(build_tokenizer(file).to_str(), encoding="utf-8")
    listed = [{"name": name, "template": text} for name, text in templates.items()]
    template_fields = {"chat_template": listed} if listed else {}
    write_json(
        target / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", **named_tokens(file), **template_fields},
    )
