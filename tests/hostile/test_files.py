"""Hostile model folders: each costs one line that names the file, the field, what was found and what is needed."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jdisagg.core.errors import CheckpointError, RequestError, WrongDtype
from jdisagg.model.hf_config import read_config
from jdisagg.model.params import check_tensors
from jdisagg.model.sources import HFSource
from tests.environment import quick
from tests.hostile.model_folders import GOOD, INDEX, OPENED, change, copy, pipe, read_all, safetensors, why_refused

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copy(tmp_path / "model")


CONFIG_LIES: list[tuple[str, Any]] = [
    ("num_hidden_layers", 1_000_000_000),
    ("num_hidden_layers", 1e9),
    ("num_hidden_layers", "4"),
    ("num_hidden_layers", True),
    ("num_hidden_layers", -4),
    ("vocab_size", 1 << 60),
    ("vocab_size", [288]),
    ("hidden_size", 0),
    ("hidden_size", {}),
    ("intermediate_size", 10**30),
    ("intermediate_size", None),
    ("num_attention_heads", "many"),
    ("num_key_value_heads", 3),
    ("num_key_value_heads", "2"),
    ("num_key_value_heads", 0),
    ("head_dim", 7),
    ("head_dim", 8.0),
    ("head_dim", -8),
    ("max_position_embeddings", "256"),
    ("max_position_embeddings", 10**12),
    ("rms_norm_eps", math.nan),
    ("rms_norm_eps", math.inf),
    ("rms_norm_eps", "1e-6"),
    ("rms_norm_eps", -1e-6),
    ("rope_theta", 0),
    ("rope_theta", "big"),
    ("rope_theta", math.nan),
    ("rope_scaling", "linear"),
    ("rope_scaling", {"rope_type": 3, "factor": 2.0}),
    ("rope_scaling", {"rope_type": "linear", "factor": "two"}),
    ("rope_scaling", {"rope_type": "linear", "factor": -1}),
    ("rope_scaling", {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 4}),
    ("rope_parameters", [1]),
    ("partial_rotary_factor", "1"),
    ("tie_word_embeddings", "yes"),
    ("attention_bias", 1),
    ("mlp_bias", []),
    ("hidden_act", 5),
    ("architectures", "LlamaForCausalLM"),
    ("architectures", [1]),
    ("architectures", {"a": 1}),
    ("quantization_config", "int4"),
    ("eos_token_id", 100_000),
    ("eos_token_id", "</s>"),
    ("eos_token_id", [1] * 1000),
    ("bos_token_id", -1),
]


@pytest.mark.parametrize(("field", "value"), CONFIG_LIES, ids=lambda each: str(each)[:30])
def test_a_config_value_of_another_kind_or_range_is_named_before_anything_is_looped_over(folder, field, value):
    if field.endswith("token_id"):
        (folder / "generation_config.json").unlink()
    began_s = time.monotonic()
    why = why_refused(change(folder, "config.json", **{field: value}))
    assert "config.json" in why and field in why, why
    assert "needed" in why or "supported" in why or "divisor" in why
    assert time.monotonic() - began_s < 5.0


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", math.nan), ("temperature", "hot"), ("top_p", 2), ("top_k", -7), ("min_p", [0]),
     ("repetition_penalty", 0), ("do_sample", "no"), ("eos_token_id", {"id": 1}), ("eos_token_id", 288)],
)  # fmt: skip
def test_a_generation_default_that_no_request_could_have_is_named_at_the_start(folder, field, value):
    why = why_refused(change(folder, "generation_config.json", **{field: value}))
    assert "generation_config.json" in why and f"{field} = " in why and "needed" in why


VALUES = (None, -1, 0, 3, 1 << 70, 1e300, math.nan, "", "x", "a" * 5000, [], [None], {}, {"x": {}}, True, [[[]]])


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", INDEX])
def test_whatever_a_field_of_a_file_is_replaced_by_there_is_no_traceback(folder: Path, name: str):
    chance, refused = random.Random(name), 0
    places = dict.fromkeys(load_file(GOOD / "model.safetensors"), "model.safetensors")
    if name == INDEX:
        change(folder, INDEX, metadata={}, weight_map=places)
    good = json.loads((folder / name).read_text()) | ({"chat_template": ""} if name.startswith("tokenizer") else {})
    for _ in range(60):
        fields = dict(good)
        for key in chance.sample(sorted(fields), min(len(fields), chance.choice((1, 1, 2)))):
            fields[key] = chance.choice(VALUES)
        if name == INDEX and isinstance(fields["weight_map"], dict):
            fields["weight_map"] = fields["weight_map"] | {chance.choice(sorted(places)): chance.choice(VALUES)}
        (folder / name).write_text(json.dumps(fields))
        try:
            refused += bool(why_refused(folder))
        except RequestError:  # a template that is nonsense refuses messages, not the start
            continue
    assert refused > 5 or name.startswith("tokenizer")


@pytest.mark.parametrize("name", OPENED)
def test_a_pipe_instead_of_a_file_is_refused_and_waited_for_by_nobody(folder: Path, name: str):
    assert f"{name} is a pipe, not a regular file" in why_refused(pipe(folder, name))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"])
def test_a_folder_or_a_device_instead_of_a_file_is_refused(folder: Path, name: str):
    (folder / name).unlink()
    (folder / name).mkdir()
    assert f"{name} is a folder" in why_refused(folder)
    (folder / name).rmdir()
    (folder / name).symlink_to("/dev/zero")
    assert f"{name} is a device" in why_refused(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", INDEX])
@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe\x00binary", b"[" * 100_000, b"[]", b'{"a":', b"1" * 10_000, b"\x00" * 1000, b"null"]
)
def test_what_is_no_json_object_is_one_line(folder: Path, name: str, content: bytes):
    (folder / name).write_bytes(content)
    assert name in why_refused(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", INDEX])
def test_a_huge_file_is_not_read(folder: Path, name: str):
    with (folder / name).open("wb") as file:
        file.truncate(1 << 40)  # takes no room on the disk
    assert f"{name} has {1 << 40} bytes, at most" in why_refused(folder)


@pytest.mark.parametrize(
    "place", ["/etc/passwd", "../model.safetensors", "sub/model.safetensors", "..", ".", "", "a\0b", 5, None, ["x"]]
)
def test_an_index_leads_to_files_of_its_own_folder_only(folder: Path, place: Any):
    outside = folder.parent / "model.safetensors"
    outside.write_bytes((GOOD / "model.safetensors").read_bytes())
    names = load_file(outside)
    change(folder, INDEX, weight_map=dict.fromkeys(names, "model.safetensors") | {"model.norm.weight": place})
    why = why_refused(folder)
    assert INDEX in why and "model.norm.weight" in why and "a file in the same folder" in why


def test_an_index_that_names_the_wrong_file_of_the_folder_is_told_so(folder: Path):
    names = load_file(GOOD / "model.safetensors")
    save_file({"other": np.zeros(3, np.float32)}, folder / "other.safetensors")
    change(folder, INDEX, weight_map=dict.fromkeys(names, "other.safetensors"))
    assert f"is not in {folder / 'other.safetensors'}, where {INDEX} says it is" in why_refused(folder)


@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.uint8, np.bool_, np.int64, ml_dtypes.float8_e4m3fn])
def test_weights_that_are_no_floating_point_numbers_are_refused(folder: Path, dtype: Any):
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].astype(dtype)}, folder / "model.safetensors")
    with pytest.raises(WrongDtype, match=rf"{name} in .* has dtype \w+; needed: float16, bfloat16, float32"):
        check_tensors(HFSource(folder), read_config(folder))


TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HEADERS: dict[str, tuple[Any, bytes, int | None]] = {
    "a length beyond the file": ({"a": TENSOR}, bytes(8), 1 << 62),
    "a length of everything": ({"a": TENSOR}, bytes(8), 2**64 - 1),
    "no json": (b"\xff" * 64, bytes(8), None),
    "nested beyond reason": (b'{"a":' * 50_000, b"", None),
    "data outside the file": ({"a": TENSOR | {"data_offsets": [0, 1 << 40]}}, bytes(8), None),
    "data that ends before it begins": ({"a": TENSOR | {"data_offsets": [8, 0]}}, bytes(8), None),
    "tensors that overlap": ({"a": TENSOR, "b": TENSOR}, bytes(8), None),
    "a hole": ({"a": TENSOR | {"data_offsets": [8, 16]}}, bytes(16), None),
    "more shape than data": ({"a": TENSOR | {"shape": [1 << 40]}}, bytes(8), None),
    "a shape that overflows": ({"a": TENSOR | {"shape": [1 << 63, 1 << 63]}}, bytes(8), None),
    "a negative shape": ({"a": TENSOR | {"shape": [-2]}}, bytes(8), None),
    "an unknown dtype": ({"a": TENSOR | {"dtype": "F3"}}, bytes(8), None),
    "nothing": (b"", b"", None),
}


@pytest.mark.parametrize("lie", HEADERS)
def test_a_header_that_lies_is_refused_without_reading_what_it_says(folder: Path, lie: str):
    header, data, length = HEADERS[lie]
    safetensors(folder / "model.safetensors", header, data, length)
    assert "model.safetensors" in why_refused(folder)


def test_layers_that_the_weights_do_not_have_are_missed_before_a_network_of_them_is_drawn(folder: Path):
    change(folder, "config.json", num_hidden_layers=512)
    began_s = time.monotonic()
    assert "model.layers.4.input_layernorm.weight is not in" in why_refused(folder)
    assert time.monotonic() - began_s < 10.0, "it took 140 s to draw it"


def test_weights_that_were_cut_off_are_refused(folder: Path):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "model.safetensors" in why_refused(folder)


def test_tokenizers_that_make_the_library_panic_or_read_beyond_its_strings_are_refused(folder: Path):
    raw = json.loads((folder / "tokenizer.json").read_text())
    template = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<none>", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}], "special_tokens": {}}  # fmt: skip
    for lie in ({"post_processor": template}, {"model": raw["model"] | {"continuing_subword_prefix": "é"}}):
        (folder / "tokenizer.json").write_text(json.dumps(raw | lie))
        assert "tokenizer.json" in why_refused(folder)


@pytest.mark.parametrize("value", [5, [5], [{"name": "default"}], {"default": 5}, "{% if %}", "{{" * 3000, "{# "])
def test_a_chat_template_that_is_none_is_refused(folder: Path, value: Any):
    (folder / "chat_template.jinja").unlink()
    assert "template" in why_refused(change(folder, "tokenizer_config.json", chat_template=value))


def test_a_folder_that_links_to_its_files_is_as_good_as_any(tmp_path: Path):
    """As the caches of model hubs are."""
    (tmp_path / "linked").mkdir()
    for path in GOOD.iterdir():
        (tmp_path / "linked" / path.name).symlink_to(path)
    assert why_refused(tmp_path / "linked") == ""


@pytest.mark.hostile
@pytest.mark.parametrize("lie", ["layers", "depth", "pipe", "tokenizer", "weights", "no folder"])
def test_the_launcher_says_it_in_one_line_and_exits_with_2(folder: Path, lie: str):
    if lie == "layers":
        change(folder, "config.json", num_hidden_layers=1_000_000_000)
    elif lie == "depth":
        change(folder, "config.json", num_hidden_layers=512)
    elif lie == "pipe":
        pipe(folder, "model.safetensors")
    elif lie == "tokenizer":
        (folder / "tokenizer.json").write_bytes(os.urandom(1000))
    elif lie == "weights":
        safetensors(folder / "model.safetensors", {"a": TENSOR}, bytes(8), 1 << 62)
    model = folder / "not here" if lie == "no folder" else folder
    command = [sys.executable, "-m", "jdisagg.launch", f"--model={model}", "--mesh=colocated:tp1", "--max_model_len=64"]
    done = subprocess.run(
        [*command, "--http_port=0", "--grpc_port=0"], capture_output=True, text=True, timeout=120, check=False,
        env=quick(),
    )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.startswith("jdisagg: ") and len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_nothing_of_a_good_folder_is_refused(folder: Path):
    assert why_refused(folder) == ""
    with pytest.raises(CheckpointError):
        read_all(folder.parent)
