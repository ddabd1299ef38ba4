"""GGUF files that are not what they should be: one line that names the file, what was found and what is needed."""

import re
import struct
from dataclasses import replace

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from jdisagg.core.errors import CheckpointError, MissingTensor, UnsupportedModel, WrongDtype, WrongShape
from jdisagg.model.checkpoint import read_model, why_no_model
from jdisagg.model.gguf.file import read_gguf
from jdisagg.model.gguf.source import GGUFSource
from jdisagg.model.params import check_tensors
from tests.fixtures.gguf_files import QUANTISED

TINY = QUANTISED["qwen2"]


def load(path):
    """All that a start reads of a file before its weights."""
    source = GGUFSource(path)
    check_tensors(source, read_model(path))
    return source


def why_refused(path, error=CheckpointError):
    with pytest.raises(error) as refused:
        load(path)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 1200
    return str(refused.value)


@pytest.fixture
def path(tmp_path):
    return TINY.write(tmp_path / "model.gguf")


def with_numbers(**changes):
    """The tiny model with other numbers in its header; None leaves one out."""
    numbers = {**TINY.numbers, **{key.replace("__", "."): value for key, value in changes.items()}}
    return lambda path: TINY.write(path, numbers={key: value for key, value in numbers.items() if value is not None})


def with_tensors(change):
    return lambda path: TINY.write(path, tensors=[each for found in TINY.tensors() for each in change(*found)])


def test_a_file_cut_off_anywhere_is_truncated(path):
    whole = path.read_bytes()
    for size in (*range(0, 400, 7), len(whole) // 3, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        why = why_refused(path)
        assert str(path) in why and ("truncated" in why or "no GGUF file" in why or "cannot read" in why), why


def test_another_magic_and_another_version_are_told(path):
    whole = path.read_bytes()
    path.write_bytes(b"GGML" + whole[4:])
    assert why_refused(path) == f"{path} is no GGUF file: it begins with b'GGML'; needed: b'GGUF'"
    path.write_bytes(whole[:4] + struct.pack("<I", 9) + whole[8:])
    assert why_refused(path) == f"{path} is GGUF of version 9; read are 2 and 3"


@pytest.mark.parametrize("at", [8, 16])
def test_counts_that_cannot_be_are_refused_before_anything_is_made_of_them(path, at):
    whole = path.read_bytes()
    path.write_bytes(whole[:at] + struct.pack("<Q", 1 << 60) + whole[at + 8 :])
    assert f"says it has {1 << 60} " in why_refused(path)


@pytest.mark.parametrize("key", ["general.architecture", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"])
def test_lengths_that_cannot_be_are_refused(path, key):
    whole = path.read_bytes()
    at = whole.index(key.encode()) + len(key) + (4 if key == "general.architecture" else 8)
    path.write_bytes(whole[:at] + struct.pack("<Q", 1 << 60) + whole[at + 8 :])
    assert "is truncated: " in why_refused(path)


def test_bytes_that_are_turned_over_never_raise_anything_else(path):
    whole, random = path.read_bytes(), np.random.default_rng(0)
    header = whole.index(b"tokenizer.ggml.tokens")
    for _ in range(150):
        at = int(random.integers(4, header))
        path.write_bytes(whole[:at] + bytes([int(random.integers(256))]) + whole[at + 1 :])
        try:
            load(path)
        except CheckpointError as error:
            assert "\n" not in str(error)


def test_a_missing_part_is_named(tmp_path):
    TINY.write(tmp_path / "part.gguf", split_max_tensors=9)
    first, second, third = sorted(tmp_path.glob("part-*"))
    second.unlink()
    for path in (first, third):
        assert why_refused(path) == f"{path} is one of 3 files; missing beside it: {second.name}"
    first.rename(second)
    assert "missing beside it: part-00001-of-00003.gguf" in why_refused(third)
    second.rename(tmp_path / "alone.gguf")
    assert "says split.no = 0, split.count = 3; by its name it is 0 of 1" in why_refused(tmp_path / "alone.gguf")


def test_parts_of_different_models_are_told_apart(tmp_path):
    TINY.write(tmp_path / "part.gguf", split_max_tensors=9)
    first, second, third = sorted(tmp_path.glob("part-*"))
    second.write_bytes(third.read_bytes())
    assert f"{second} says split.no = 2" in why_refused(first)


REFUSED = [
    (with_tensors(lambda n, x, k: [] if n == "blk.1.ffn_up.weight" else [(n, x, k)]), "mlp.up_proj.weight is not in"),
    (
        with_tensors(lambda n, x, k: [(n, x[:32] if n == "blk.0.attn_q.weight" else x, k)]),
        "has shape (32, 64); the config asks for (64, 64)",
    ),
    (with_tensors(lambda n, x, k: [(n, x, k), ("s" + n, x, k)]), "has no place in a qwen2 model here"),
    (with_tensors(lambda n, x, k: [] if "token_embd" in n else [(n, x, k)]), "has no tensor token_embd.weight"),
    (with_numbers(block_count=4), "tensor model.layers.2.input_layernorm.weight is not in"),
    (with_numbers(block_count=100_000), "num_hidden_layers = 100000; needed: a whole number from 1 to 512"),
    (with_numbers(embedding_length=None), "hidden_size = None; needed: a whole number"),
    (with_numbers(attention__head_count=0), "num_attention_heads = 0; needed"),
    (with_numbers(attention__key_length=32, attention__value_length=16), "keys of 32 numbers a head and values of 16"),
    (with_numbers(rope__dimension_count=8), "partial_rotary_factor 0.5 is not supported"),
    (with_numbers(expert_count=8), "qwen2.expert_count = 8 is not supported"),
    (with_numbers(final_logit_softcapping=30.0), "qwen2.final_logit_softcapping = 30.0 is not supported"),
]


@pytest.mark.parametrize(("write", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_a_model_that_cannot_be_is_refused_in_one_line(write, says, tmp_path):
    path = write(tmp_path / "model.gguf")
    why = why_refused(path)
    assert str(path) in why and says in why


def test_every_refusal_has_its_own_name(tmp_path):
    for (write, says), error in zip(REFUSED[:3], (MissingTensor, WrongShape, UnsupportedModel), strict=True):
        assert says in why_refused(write(tmp_path / f"{error.__name__}.gguf"), error)


def test_another_architecture_is_refused_by_name(tmp_path):
    path = replace(TINY, architecture="rwkv7").write(tmp_path / "model.gguf")
    assert why_refused(path, UnsupportedModel) == (
        f"{path}: architecture 'rwkv7' is not supported; supported: deepseek2, gemma2, gemma3, gpt-oss, llama,"
        " olmo2, phi3, qwen2, qwen3, qwen3moe"
    )


def test_an_unknown_quantisation_is_refused_by_its_number(path):
    whole, name = path.read_bytes(), b"blk.1.ffn_down.weight"
    at = whole.rindex(name) + len(name) + 4 + 16
    path.write_bytes(whole[:at] + struct.pack("<I", 77) + whole[at + 4 :])
    assert f"tensor {name.decode()} is of unknown quantisation 77; known are F32, F16" in why_refused(path, WrongDtype)


def test_rows_that_are_no_whole_blocks_are_refused(path):
    whole, name = path.read_bytes(), b"blk.1.ffn_down.weight"
    at = whole.rindex(name) + len(name) + 4
    path.write_bytes(whole[:at] + struct.pack("<Q", 33) + whole[at + 8 :])
    assert "of shape (64, 33) is no whole number of blocks of 32 (Q4_" in why_refused(path)


def test_a_quantisation_that_nobody_can_undo_is_refused_by_name(tmp_path):
    def change(name, tensor, kind):
        return [(name, np.zeros((64, 64), np.int8), Kind.I8) if name == "blk.0.ffn_up.weight" else (name, tensor, kind)]

    path = with_tensors(change)(tmp_path / "model.gguf")
    assert re.search(r"mlp.up_proj.weight in .* has dtype I8; needed: float16", why_refused(path, WrongDtype))


def test_factors_of_another_scaling_than_llama_3s_are_refused(tmp_path):
    tiny = QUANTISED["llama"]
    factors = np.linspace(1, 7, 16, dtype=np.float32)
    path = tiny.write(tmp_path / "model.gguf", tensors=[*tiny.tensors(), ("rope_freqs.weight", factors, Kind.F32)])
    assert "rope_freqs.weight (1 to 7) are not those of Llama 3.1's scaling" in why_refused(path, UnsupportedModel)


def test_what_is_no_model_is_told_by_what_lies_there(tmp_path):
    assert "no config.json" in (why_no_model(tmp_path) or "")
    TINY.write(tmp_path / "model.gguf")
    assert (why_no_model(tmp_path) or "").endswith("name its file model.gguf")
    (tmp_path / "notes.txt").write_text("x")
    assert "name ends in .gguf" in (why_no_model(tmp_path / "notes.txt") or "")
    assert why_no_model(tmp_path / "model.gguf") is None
    with pytest.raises(CheckpointError, match=r"cannot read .*nowhere.gguf: No such file"):
        read_gguf(tmp_path / "nowhere.gguf")
