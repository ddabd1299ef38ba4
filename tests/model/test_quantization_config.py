"""What `quantization_config` may say: what is known is read as it is meant, all else is refused with both values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jdisagg.core.errors import UnsupportedModel
from jdisagg.model.files import JsonFields
from jdisagg.model.hf_config import parse_config
from jdisagg.model.quantized.config import (
    GPTQ,
    METHODS,
    QuantizationConfig,
    ScaledFormat,
    quantization_of,
    read_quantization,
)
from tests.fixtures.quantized_folders import CONFIG, SCHEMES, compressed

CHANNEL = {"num_bits": 8, "type": "int", "strategy": "channel"}
W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
AWQ, GPTQ4 = (
    {"quant_method": "awq", "bits": 4, "group_size": 128},
    {"quant_method": "gptq", "bits": 4, "group_size": 128},
)


def said(**fields: Any) -> QuantizationConfig | None:
    return quantization_of(JsonFields({"quantization_config": fields}, "config.json"))


def test_the_schemes_of_the_tests_are_all_methods():
    assert {config["quant_method"] for config, _ in SCHEMES.values()} | {"mxfp4"} == set(METHODS)


@pytest.mark.parametrize("config", [{}, None])
def test_a_config_that_says_nothing_means_plain_weights(config):
    assert quantization_of(JsonFields({"quantization_config": config}, "config.json")) is None
    assert quantization_of(JsonFields({}, "config.json")) is None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "bitsandbytes"}, ["'bitsandbytes'", "awq, gptq, mxfp4"]),
        ({"bits": 4}, ["'unnamed'"]),
        ({"quant_method": 4}, ["quant_method = 4", "a text"]),
        ({**AWQ, "bits": 3}, ["bits = 3", "supported: 4"]),
        ({**AWQ, "version": "gemv"}, ["version = 'gemv'", "gemm"]),
        ({**AWQ, "zero_point": False}, ["zero_point = False", "True"]),
        ({**AWQ, "group_size": 0}, ["group_size = 0", "-1"]),
        ({**AWQ, "group_size": "128"}, ["group_size = '128'"]),
        ({"quant_method": "awq", "bits": 4}, ["group_size = None"]),
        ({**GPTQ4, "bits": 3}, ["bits = 3", "2, 4, 8"]),
        ({**GPTQ4, "bits": 4.0}, ["bits = 4.0", "2, 4, 8"]),
        ({**GPTQ4, "checkpoint_format": "marlin"}, ["checkpoint_format = 'marlin'", "gptq, gptq_v2"]),
        ({**GPTQ4, "format": "bitblas"}, ["format = 'bitblas'", "gptq, gptq_v2"]),
        ({**GPTQ4, "is_marlin_format": True}, ["is_marlin_format = True"]),
        ({**GPTQ4, "desc_act": "no"}, ["desc_act = 'no'"]),
        ({**GPTQ4, "pack_dtype": "int16"}, ["pack_dtype = 'int16'", "int32"]),
        ({**GPTQ4, "dynamic": {"+:.*down.*": {"bits": 8}}}, ["dynamic", "-:"]),
        ({"quant_method": "fp8", "fmt": "e5m2"}, ["fmt = 'e5m2'", "e4m3"]),
        ({"quant_method": "fp8", "weight_block_size": [128]}, ["weight_block_size = [128]", "two whole numbers"]),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, ["weight_block_size = [0, 128]"]),
        ({"quant_method": "fp8", "activation_scheme": "odd"}, ["activation_scheme = 'odd'", "dynamic, static"]),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ["quant_algo = 'NVFP4'", "FP8"]),
        (compressed("nvfp4-pack-quantized", CHANNEL), ["'nvfp4-pack-quantized'", "pack-quantized"]),
        (compressed("marlin-24", CHANNEL), ["'marlin-24'"]),
        (compressed("int-quantized", {**CHANNEL, "num_bits": 4}), ["num_bits = 4", "8"]),
        (compressed("int-quantized", {**CHANNEL, "strategy": "token"}), ["strategy = 'token'", "channel"]),
        (compressed("float-quantized", {**CHANNEL, "strategy": "block"}), ["block_structure = None"]),
        (compressed("pack-quantized", {**W4, "num_bits": 3}), ["num_bits = 3", "4, 8"]),
        (compressed("pack-quantized", {**W4, "type": "float"}), ["type = 'float'", "int"]),
        (compressed("pack-quantized", W4, sparsity_config={"format": "sparse-24-bitmask"}), ["sparse-24", "dense"]),
        (compressed("pack-quantized", W4, transform_config={"config_groups": {"R1": {}}}), ["transform_config"]),
        (compressed("int-quantized", {**CHANNEL, "dynamic": True}), ["dynamic = True"]),
        (compressed("int-quantized", CHANNEL, quantization_status="calibration"), ["'calibration'", "compressed"]),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, ["config_groups", "none"]),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "int-quantized",
                "config_groups": {"a": {"weights": CHANNEL}, "b": {"weights": W4, "format": "pack-quantized"}},
            },
            ["int8, a scale a row; packed int4, groups of 32", "one way"],
        ),
    ],
)
def test_what_would_be_read_wrongly_is_refused_by_name_with_both_values(config, words):
    with pytest.raises(UnsupportedModel) as caught:
        parse_config({**CONFIG, "quantization_config": config})
    assert all(word in str(caught.value) for word in ("config.json", *words)), caught.value
    assert "\n" not in str(caught.value)


def test_two_groups_that_quantise_weights_alike_are_one_scheme():
    groups = {"a": {"weights": CHANNEL, "targets": ["q"]}, "b": {"weights": CHANNEL}, "c": {"weights": None}}
    found = said(quant_method="compressed-tensors", format="int-quantized", config_groups=groups)
    assert found is not None and found.scheme == ScaledFormat("int8", label="int8, a scale a row")


def test_the_first_key_that_compressed_tensors_had_is_read():
    found = quantization_of(JsonFields({"compression_config": compressed("pack-quantized", W4)}, "config.json"))
    assert found is not None and found.scheme.label == "packed int4, groups of 32"


@pytest.mark.parametrize(
    ("fields", "offset"),
    [({}, 1), ({"checkpoint_format": "gptq"}, 1), ({"checkpoint_format": "gptq_v2"}, 0), ({"format": "gptq_v2"}, 0)],
)
def test_only_the_first_format_of_gptq_stores_zero_points_less_one(fields, offset):
    found = said(**GPTQ4, **fields, dynamic={"-:.*head": {}})
    assert found is not None and isinstance(found.scheme, GPTQ) and found.scheme.zero_offset == offset


@pytest.mark.parametrize("inside", [True, False])
def test_modelopts_own_file_is_read_where_the_config_is_silent(tmp_path: Path, inside: bool):
    said = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    config = {**CONFIG, **({"quantization_config": {**said, "quant_method": "modelopt"}} if inside else {})}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if not inside:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": said}))
    found = read_quantization(tmp_path)
    assert found is not None and found.kv_cache and found.activations and found.scheme.numbers == ".weight"
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": None}}))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert read_quantization(tmp_path) is None


def test_products_of_quantised_activations_and_scales_of_pages_are_remembered():
    found = said(**compressed("int-quantized", CHANNEL, kv_cache_scheme={"num_bits": 8}))
    assert found is not None and (found.activations, found.kv_cache) == (False, True)
    group = {"weights": CHANNEL, "input_activations": {"num_bits": 8, "dynamic": True}}
    found = said(quant_method="compressed-tensors", format="int-quantized", config_groups={"a": group})
    assert found is not None and (found.activations, found.kv_cache) == (True, False)
    found = said(**AWQ)
    assert found is not None and (found.activations, found.kv_cache) == (False, False)
