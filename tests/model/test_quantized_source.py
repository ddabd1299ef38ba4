"""Folders of quantised weights against the plain weights that they stand for: whole, in shards, and slice by slice."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from jdisagg import terminal
from jdisagg.commands.convert import convert
from jdisagg.core.errors import CheckpointError, MissingTensor, WrongDtype, WrongShape
from jdisagg.core.settings import Settings
from jdisagg.model.checkpoint import OrbaxSource, open_source, read_model, storage_line
from jdisagg.model.params import StageSpec, check_tensors, load_stage
from jdisagg.model.quantized.config import read_quantization
from jdisagg.model.quantized.source import QuantizedSource
from jdisagg.model.sources import HFSource, TensorSource
from jdisagg.serve.deploy.deployment import resolve_deployment
from tests.fixtures.gguf_files import QUANTISED
from tests.fixtures.quantized_folders import LAYERS, ROOT, SCHEMES, Folders, Tensors, compressed, write, write_pair
from tests.model.sharded import mesh_of, run_stage, stage_output

DOWN, GATE = "model.layers.1.mlp.down_proj", "model.layers.0.mlp.gate_proj"


@cache
def folders(scheme: str) -> Folders:
    return write_pair(Path(mkdtemp(prefix="quantized-")), scheme)


def opened(place: Path) -> TensorSource:
    return open_source(place, "hf", read_model(place))


def whole(source: TensorSource, name: str) -> np.ndarray:
    return source.read(name, tuple(slice(0, size) for size in source.shape(name) or ()))


def load_raw(folder: Path) -> Tensors:
    """The tensors as they are stored."""
    inner = HFSource(folder)
    return {name: whole(inner, name) for name in inner.names}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_weight_is_exactly_what_its_numbers_and_scales_say(scheme):
    pair = folders(scheme)
    source = opened(pair.stored)
    assert isinstance(source, QuantizedSource) and source.names == sorted(pair.weights)
    check_tensors(source, read_model(pair.stored))
    for name, expected in pair.weights.items():
        found = whole(source, name)
        assert source.shape(name) == expected.shape and source.dtype(name) == str(expected.dtype) == str(found.dtype)
        assert np.array_equal(found, expected), name
        assert (source.scheme_of(name) is not None) == name.endswith("_proj.weight")


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_shards_hold_the_same_numbers_as_those_of_the_plain_folder(scheme, tp):
    pair = folders(scheme)
    config = read_model(pair.stored)
    assert config == read_model(pair.plain)
    ours, plain = (
        load_stage(opened(place), StageSpec(config, range(LAYERS), mesh_of(tp), jnp.float32))
        for place in (pair.stored, pair.plain)
    )
    assert ours.specs == plain.specs
    for found, expected in zip(ours.leaves, plain.leaves, strict=True):
        assert np.array_equal(found, expected)
        if tp == 2 and found.sharding.num_devices == 2:
            for mine, theirs in zip(found.addressable_shards, expected.addressable_shards, strict=True):
                assert mine.index == theirs.index and np.array_equal(mine.data, theirs.data)


def test_logits_of_shards_are_those_of_the_whole():
    pair = folders("gptq-any-order")
    config, tokens = read_model(pair.stored), np.arange(20, dtype=np.int32) % 48
    logits = []
    for place, tp in ((pair.plain, 1), (pair.stored, 2)):
        params = load_stage(opened(place), StageSpec(config, range(LAYERS), mesh_of(tp), jnp.float32))
        logits.append(run_stage(params, mesh_of(tp), stage_output, tokens))
    assert np.abs(logits[0] - logits[1]).max() <= 1e-4 < np.abs(logits[0]).max()


@pytest.mark.parametrize("scheme", SCHEMES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_slice_is_the_same_as_the_slice_of_the_whole(scheme, data):
    """Which begin and end inside words, blocks and groups."""
    pair = folders(scheme)
    name = data.draw(st.sampled_from([f"{DOWN}.weight", f"{GATE}.weight"]))
    shape = pair.weights[name].shape
    bounds = [sorted(data.draw(st.lists(st.integers(0, size), min_size=2, max_size=2))) for size in shape]
    index = tuple(slice(*each) for each in bounds)
    assert np.array_equal(opened(pair.stored).read(name, index), pair.weights[name][index])


GROUPS_OF_32 = {"type": "int", "strategy": "group", "group_size": 32}
FIXTURES = {  # what each of the files of make_quantized.py says of itself
    "fp8-blocks": {"quant_method": "fp8", "weight_block_size": [24, 40]},
    "mxfp4": {"quant_method": "mxfp4"},
    "packed-w4a16": compressed("pack-quantized", {"num_bits": 4, **GROUPS_OF_32}),
    "packed-w4a16-zero-points": compressed("pack-quantized", {"num_bits": 4, "symmetric": False, **GROUPS_OF_32}),
    "packed-w8a16": compressed("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "int-quantized": compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "float-quantized": compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
}


@cache
def fixture(name: str) -> tuple[QuantizedSource, str, np.ndarray]:
    """The tensors of a file that other libraries wrote, the one weight among them, and what they make of it."""
    tensors = {key: np.array(value) for key, value in load_raw(ROOT / name).items()}
    expected = tensors.pop("expected")
    place = write(Path(mkdtemp(prefix="quantized-")), tensors, quantization_config=FIXTURES[name])
    quantization = read_quantization(place)
    assert quantization is not None
    source = QuantizedSource(HFSource(place), quantization)
    assert len(source.names) == 1
    return source, source.names[0], expected


def test_the_fixtures_are_all_held_to():
    assert sorted(FIXTURES) == sorted(path.name for path in ROOT.iterdir())


@pytest.mark.parametrize("name", FIXTURES)
def test_weights_are_those_that_transformers_and_compressed_tensors_compute(name):
    source, weight, expected = fixture(name)
    assert source.shape(weight) == expected.shape and np.array_equal(whole(source, weight), expected)
    assert expected.size and np.abs(expected).max() > 0.1


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_slice_of_experts_in_mxfp4_is_the_same_as_the_slice_of_the_whole(data):
    source, weight, expected = fixture("mxfp4")
    assert weight == "model.layers.0.mlp.experts.gate_up_proj"
    index = tuple(
        slice(*sorted(data.draw(st.lists(st.integers(0, size), min_size=2, max_size=2)))) for size in expected.shape
    )
    assert np.array_equal(source.read(weight, index), expected[index])


def test_a_power_of_two_that_is_no_number_makes_none(tmp_path):
    source, weight, _ = fixture("mxfp4")
    tensors = {name: whole(source.inner, name) for name in source.inner.names}
    tensors[f"{weight}_scales"][1, 2, 3] = 255
    place = write(tmp_path, tensors, quantization_config=FIXTURES["mxfp4"])
    found = whole(QuantizedSource(HFSource(place), source.quantization), weight)
    assert np.isnan(found[1, 96:128, 2]).all() and np.isnan(found).sum() == 32


@pytest.mark.parametrize(
    ("ending", "change", "words"),
    [
        ("_scales", lambda x: x[:, 1:], ["_scales", "[3, 47, 5]", "[3, 48, 5]"]),
        ("_blocks", lambda x: x[..., :8], ["_blocks", "[3, 48, 5, 8]", "16 bytes"]),
        ("_blocks", lambda x: x.view(np.int8), ["int8", "uint8"]),
        ("_scales", None, ["_scales is not in"]),
    ],
)
def test_mxfp4_tensors_that_disagree_are_named(ending, change, words, tmp_path):
    source, weight, _ = fixture("mxfp4")
    tensors = {name: whole(source.inner, name) for name in source.inner.names}
    stored = tensors.pop(weight + ending)
    if change is not None:
        tensors[weight + ending] = np.ascontiguousarray(change(stored))
    place = write(tmp_path, tensors, quantization_config=FIXTURES["mxfp4"])
    with pytest.raises(CheckpointError) as caught:
        QuantizedSource(HFSource(place), source.quantization).shape(weight)
    assert all(word in str(caught.value) for word in (str(place), *words)), caught.value


class Counting(HFSource):
    """Adds up the bytes that are asked of it."""

    asked = 0

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        found = super().read(name, index)
        self.asked += found.nbytes
        return found


@pytest.mark.parametrize("cut", [0, 1])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_shards_slice_asks_for_its_own_bytes_only(scheme, cut):
    """Half of a matrix is half of what it is stored in, but for the block, word or group that the cut goes through."""
    pair = folders(scheme)
    quantization = read_quantization(pair.stored)
    assert quantization is not None
    inner = Counting(pair.stored)
    source, name = QuantizedSource(inner, quantization), f"{GATE}.weight"
    shape = pair.weights[name].shape
    inner.asked = 0
    source.read(name, (slice(0, shape[0]), slice(0, shape[1])))
    everything, inner.asked = inner.asked, 0
    half = [slice(0, size // 2 if axis == cut else size) for axis, size in enumerate(shape)]
    source.read(name, tuple(half))
    numbers = everything * 0.5
    scales = sum(inner.num_bytes(f"{GATE}{end}") for end in quantization.scheme.beside if inner.shape(f"{GATE}{end}"))
    assert numbers <= inner.asked <= numbers + scales * 0.5 + 8 < everything


def damaged(scheme: str, change: Callable[[Tensors], object], tmp_path: Path) -> CheckpointError:
    """What loading says once `change` was done to the tensors."""
    pair = folders(scheme)
    tensors = {name: np.array(tensor) for name, tensor in load_raw(pair.stored).items()}
    change(tensors)
    said = SCHEMES[scheme][0]
    place = write(tmp_path / "damaged", tensors, quantization_config=said)
    with pytest.raises(CheckpointError) as caught:
        load_stage(opened(place), StageSpec(read_model(place), range(LAYERS), mesh_of(1), jnp.float32))
    assert "\n" not in str(caught.value) and str(place) in str(caught.value)
    return caught.value


def without(*names: str) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.pop(name) for name in names]


def replaced(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: np.ascontiguousarray(change(tensors[name]))})


@pytest.mark.parametrize(
    ("scheme", "change", "kind", "words"),
    [
        ("awq", without(f"{DOWN}.scales"), MissingTensor, [f"{DOWN}.scales is not in"]),
        ("awq", without(f"{DOWN}.qweight"), MissingTensor, [f"{DOWN}.weight is not in"]),
        ("awq", replaced(f"{DOWN}.qzeros", lambda x: x[:, 1:]), WrongShape, [f"{DOWN}.qzeros", "[3, 7]", "[3, 8]"]),
        ("awq", replaced(f"{DOWN}.scales", lambda x: x[:2]), WrongShape, [f"{DOWN}.scales", "[2, 64]", "[3, 64]"]),
        ("awq", replaced(f"{DOWN}.qweight", lambda x: x.astype(np.int64)), WrongDtype, ["int64", "int32"]),
        ("awq", replaced(f"{DOWN}.qweight", lambda x: x[0]), WrongShape, ["two dimensions"]),
        ("gptq", replaced(f"{DOWN}.qzeros", lambda x: x[:, 1:]), WrongShape, ["qzeros", "[3, 7]", "[3, 8]"]),
        ("gptq", replaced(f"{DOWN}.g_idx", lambda x: x[1:]), WrongShape, ["g_idx", "[95]", "[96]"]),
        ("gptq", replaced(f"{DOWN}.g_idx", lambda x: x + 1), CheckpointError, ["g_idx", "1 to 3", "0 to 2"]),
        ("gptq", replaced(f"{DOWN}.scales", lambda x: x.astype(np.int32)), WrongDtype, ["int32", "float16"]),
        ("gptq-any-order", without(f"{DOWN}.g_idx"), MissingTensor, [f"{DOWN}.g_idx"]),
        ("gptq-v2", without(f"{DOWN}.qzeros"), MissingTensor, [f"{DOWN}.qzeros"]),
        (
            "gptq-v2",
            replaced(f"{DOWN}.qweight", lambda x: x[1:]),
            WrongShape,
            [f"{DOWN}.weight", "(64, 88)", "(64, 96)"],
        ),
        ("fp8-blocks", without(f"{DOWN}.weight_scale_inv"), MissingTensor, [f"{DOWN}.weight_scale_inv or"]),
        ("fp8-blocks", replaced(f"{DOWN}.weight_scale_inv", lambda x: x[1:]), WrongShape, ["[1, 4]", "[2, 4]"]),
        ("fp8-blocks", replaced(f"{DOWN}.weight", lambda x: x.view(np.int8)), WrongDtype, ["int8", "float8_e4m3fn"]),
        ("compressed-w8a8", replaced(f"{DOWN}.weight_scale", lambda x: x[1:]), WrongShape, ["[63, 1]", "[64, 1]"]),
        ("packed-w4a16", without(f"{DOWN}.weight_shape"), MissingTensor, [f"{DOWN}.weight_shape"]),
        ("packed-w4a16", replaced(f"{DOWN}.weight_shape", lambda x: x + 8), WrongShape, ["weight_packed", "[72, 13]"]),
        ("packed-w4a16", replaced(f"{DOWN}.weight_shape", lambda x: -x), WrongShape, ["weight_shape", "-64"]),
        ("packed-w4a16", replaced(f"{DOWN}.weight_scale", lambda x: x[:, 1:]), WrongShape, ["[64, 5]", "[64, 6]"]),
        ("packed-w4a16-zero-points", without(f"{DOWN}.weight_zero_point"), MissingTensor, ["weight_zero_point"]),
    ],
)
def test_what_is_missing_or_of_another_shape_is_named_in_one_line(scheme, change, kind, words, tmp_path):
    error = damaged(scheme, change, tmp_path)
    assert type(error) is kind and all(word in str(error) for word in words), error


def test_a_weight_of_another_shape_than_the_configs_is_named_with_both(tmp_path):
    folder = folders("awq").stored
    place = write(tmp_path, load_raw(folder), quantization_config=SCHEMES["awq"][0], intermediate_size=128)
    with pytest.raises(WrongShape, match=r"down_proj\.weight .* shape \(64, 96\); the config asks for \(64, 128\)"):
        check_tensors(opened(place), read_model(place))


@pytest.mark.parametrize("scheme", ["awq", "gptq", "fp8-blocks", "packed-w4a16", "compressed-w8a8"])
def test_a_weight_that_is_stored_plain_is_read_as_it_is_whatever_lists_say(scheme, tmp_path):
    pair = folders(scheme)
    tensors = {name: tensor for name, tensor in load_raw(pair.stored).items() if not name.startswith(DOWN)}
    kept = pair.weights[f"{DOWN}.weight"].astype(np.float16)
    said = SCHEMES[scheme][0] | {"modules_to_not_convert": ["lm_head"], "ignore": ["lm_head"]}
    source = opened(write(tmp_path, tensors | {f"{DOWN}.weight": kept}, quantization_config=said))
    assert source.dtype(f"{DOWN}.weight") == "float16" and np.array_equal(whole(source, f"{DOWN}.weight"), kept)
    assert np.array_equal(whole(source, f"{GATE}.weight"), pair.weights[f"{GATE}.weight"])


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("fmt", ["hf", "orbax"])
@pytest.mark.parametrize("scheme", ["gptq-any-order", "modelopt"])
def test_a_converted_folder_is_plain(scheme, fmt, dtype, tmp_path):
    pair = folders(scheme)
    stored = shutil.copytree(pair.stored, tmp_path / "stored")
    (stored / "quantize_config.json").write_text("{}")
    convert(stored, tmp_path / "plain", fmt, dtype)
    said = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert "quantization_config" not in said and said["torch_dtype"] == (dtype or "float32")
    assert not (tmp_path / "plain" / "quantize_config.json").exists()
    config = read_model(tmp_path / "plain")
    source = open_source(tmp_path / "plain", fmt, config)
    assert config == read_model(pair.plain) and not isinstance(source, QuantizedSource)
    assert isinstance(source, HFSource | OrbaxSource) and sorted(pair.weights) == source.names
    for name, weight in pair.weights.items():
        assert np.array_equal(whole(source, name), weight if dtype is None else weight.astype(dtype)), name


def test_the_launcher_says_what_is_held_of_what_is_stored():
    pair = folders("modelopt")
    line = storage_line(pair.stored, "bfloat16")
    numbers = sum(weight.size for weight in pair.weights.values())
    quantised = sum(weight.size for name, weight in pair.weights.items() if name.endswith("_proj.weight"))
    source = opened(pair.stored)
    assert isinstance(source, QuantizedSource) and source.num_weights() == numbers
    scales = 4 * 4 * 14  # weight_scale, input_scale, k_scale and v_scale of each projection here
    assert source.stored_bytes() == quantised + 2 * (numbers - quantised) + scales
    assert line is not None and "fp8 e4m3" in line
    sizes = [f"{size / (1 << 20):.2f} MiB" for size in (source.stored_bytes(), numbers * 2)]
    assert f"{sizes[0]} in files, dequantised on load to {sizes[1]} of bfloat16" in line
    assert "activations are not" in line and "KV pages are not read" in line
    assert storage_line(pair.plain, "bfloat16") is None
    gguf = storage_line(QUANTISED["qwen2"].write(pair.stored.parent / "model.gguf"), "float32")
    assert gguf is not None and gguf.startswith("gguf of Q8_0, Q4_1, Q4_0, F32: ")


@pytest.mark.parametrize("load_format", ["hf", "random"])
def test_the_banner_has_a_line_for_quantised_weights(load_format):
    place = folders("awq").stored
    deployment = resolve_deployment(
        Settings(model=str(place), mesh="prefill:tp1,decode:tp1", load_format=load_format), "cpu", None
    )
    console = Console(record=True, file=io.StringIO(), width=400)
    terminal.show(console, deployment, "cpu", load_format)
    assert ("awq of 4 bits, groups of 32" in console.export_text()) == (load_format == "hf")
