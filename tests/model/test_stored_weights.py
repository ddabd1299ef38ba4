"""Checkpoints of int8 and fp8 with a scale a channel: what lies on the devices are their own numbers and scales."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jdisagg import terminal
from jdisagg.core.model_config import AS_MADE, ModelConfig, WeightFormat
from jdisagg.core.settings import Settings
from jdisagg.model.checkpoint import open_source, read_model
from jdisagg.model.params import StageParams, StageSpec, load_stage
from jdisagg.model.sources import HFSource, TensorSource
from jdisagg.serve.deploy.deployment import Deployment, resolve_deployment
from tests.fixtures.quantized_folders import LAYERS, SCHEMES, Folders, Tensors, write, write_pair
from tests.model.sharded import mesh_of, run_stage, stage_output

GATE, UP, DOWN = (f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down"))
TOKENS = np.arange(20, dtype=np.int32) % 48
ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}


@cache
def folders(scheme: str) -> Folders:
    """`compressed-w8a8` here says that activations are meant to be rounded as well."""
    pair = write_pair(Path(mkdtemp(prefix="stored-")), scheme)
    said = SCHEMES[scheme][0]
    if scheme == "compressed-w8a8":
        group = said["config_groups"]["group_0"] | {"input_activations": ACTIVATIONS}
        said = said | {"config_groups": {"group_0": group}}
        write(pair.stored, tensors_of(pair.stored), quantization_config=said)
    return pair


def tensors_of(folder: Path) -> Tensors:
    """As they are stored."""
    inner = HFSource(folder)
    return {
        name: np.array(inner.read(name, tuple(slice(0, size) for size in inner.shape(name) or ())))
        for name in inner.names
    }


def opened(place: Path) -> tuple[ModelConfig, TensorSource]:
    config = read_model(place)
    return config, open_source(place, "hf", config)


def deployed(place: Path, platform: str = "cpu", **settings: Any) -> Deployment:
    device_bytes = None if platform == "cpu" else 1 << 30
    asked = Settings(model=str(place), mesh="prefill:tp1,decode:tp1", **settings)
    return resolve_deployment(asked, platform, device_bytes)


def loaded(place: Path, weights: WeightFormat, tp: int = 1, out_first: bool = True) -> StageParams:
    config, source = opened(place)
    return load_stage(source, StageSpec(config, range(LAYERS), mesh_of(tp), jnp.float32, weights, out_first))


@pytest.mark.parametrize("out_first", [False, True])
@pytest.mark.parametrize("scheme", ["compressed-w8a8", "compressed-fp8", "modelopt", "fp8-tensor"])
def test_the_numbers_and_scales_on_the_device_are_the_checkpoints_own(scheme: str, out_first: bool):
    place, dtype = folders(scheme).stored, "int8" if scheme.endswith("w8a8") else "fp8"
    stored, params = tensors_of(place), loaded(place, WeightFormat(dtype, frozenset({"head"})), out_first=out_first)
    mlp = params.merge(params.leaves).layers[1].mlp
    for weight, names in ((mlp.gate_up, (GATE, UP)), (mlp.down, (DOWN,))):
        assert weight.scale is not None
        kernel, scale = np.asarray(weight.kernel[...]), np.asarray(weight.scale[...])
        expected = np.concatenate([stored[f"{name}.weight"] for name in names])
        scales = [
            np.broadcast_to(
                stored[f"{name}.weight_scale"].astype(np.float32).reshape(-1), len(stored[f"{name}.weight"])
            )
            for name in names
        ]
        assert kernel.dtype == expected.dtype
        assert np.ascontiguousarray(kernel if out_first else kernel.T).tobytes() == expected.tobytes()
        np.testing.assert_array_equal(scale, np.concatenate(scales))


def test_shards_hold_their_part_of_the_stored_numbers_and_compute_the_same():
    place = folders("compressed-w8a8").stored
    weights = deployed(place).weights
    one, two = (loaded(place, weights, tp) for tp in (1, 2))
    down = two.merge(two.leaves).layers[1].mlp.down
    expected = tensors_of(place)[f"{DOWN}.weight"]
    assert np.asarray(down.kernel[...]).tobytes() == expected.tobytes()
    assert [shard.data.shape for shard in down.kernel[...].addressable_shards] == [(64, 48)] * 2
    whole, sharded = (run_stage(params, mesh_of(tp), stage_output, TOKENS) for params, tp in ((one, 1), (two, 2)))
    np.testing.assert_allclose(sharded, whole, atol=1e-4)
    full = run_stage(loaded(folders("compressed-w8a8").plain, AS_MADE), mesh_of(1), stage_output, TOKENS)
    assert 0 < np.linalg.norm(whole - full) < 0.05 * np.linalg.norm(full)


@pytest.mark.parametrize("asked", ["stored", "auto"])
def test_int8_is_served_as_it_is_stored_and_what_is_stored_plain_stays_full(asked: str, tmp_path: Path):
    place = folders("compressed-w8a8").stored
    assert deployed(place, weight_dtype=asked).weights == WeightFormat("int8", frozenset({"head"}))
    tensors = {name: tensor for name, tensor in tensors_of(place).items() if not name.startswith(DOWN)}
    plain = folders("compressed-w8a8").weights[f"{DOWN}.weight"]
    (tmp_path / "config.json").write_bytes((place / "config.json").read_bytes())
    from_config = deployed(tmp_path, weight_dtype=asked).weights
    assert from_config == WeightFormat("int8", frozenset({"head"})), "of a folder without weights"
    said = folders_config(place)
    mixed = write(tmp_path / "mixed", tensors | {f"{DOWN}.weight": plain}, quantization_config=said)
    weights = deployed(mixed, weight_dtype=asked).weights
    assert weights == WeightFormat("int8", frozenset({"head", "1.mlp.down"}))
    down = loaded(mixed, weights).merge(loaded(mixed, weights).leaves).layers[1].mlp.down
    np.testing.assert_array_equal(down.kernel[...], plain)


def folders_config(place: Path) -> dict[str, Any]:
    return json.loads((place / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize(
    ("scheme", "platform", "asked", "expected"),
    [
        ("fbgemm", "gpu", "stored", "fp8"),
        ("fbgemm", "cpu", "stored", "dtype"),
        ("fbgemm", "tpu", "stored", "dtype"),
        ("compressed-fp8", "gpu", "stored", "dtype"),  # of weights alone: activations are not meant to be rounded
        ("modelopt", "gpu", "stored", "fp8"),
        ("modelopt", "gpu", "dtype", "dtype"),
        ("compressed-w8a8", "tpu", "stored", "int8"),
        ("compressed-w8a8", "cpu", "dtype", "dtype"),
        ("fp8-blocks", "gpu", "stored", "dtype"),
        ("packed-w4a16", "cpu", "stored", "dtype"),
        ("awq", "cpu", "auto", "auto"),
    ],
)
def test_what_no_product_takes_as_it_is_is_dequantised(scheme: str, platform: str, asked: str, expected: str):
    assert deployed(folders(scheme).stored, platform, weight_dtype=asked).weight_dtype == expected


@pytest.mark.parametrize(
    ("scheme", "says"), [("compressed-w8a8", "multiplied as they are stored"), ("modelopt", "dequantised on load to")]
)
def test_the_banner_says_whether_weights_are_dequantised(scheme: str, says: str):
    console = Console(record=True, file=io.StringIO(), width=400)
    terminal.show(console, deployed(folders(scheme).stored), "cpu", "hf")
    assert says in console.export_text()
