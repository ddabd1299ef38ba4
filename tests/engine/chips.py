"""Workers of Llama's shapes on chips that are not there: a few layers of the 8B or the 70B model, real programs."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest

from jdisagg.core.errors import ConfigError
from jdisagg.core.hardware import Target
from jdisagg.core.layout.kv_layout import KVLayout
from jdisagg.core.model_config import AS_MADE, Experts, Latent, ModelConfig, WeightFormat
from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import Role, Stages, WorkerConfig
from jdisagg.engine.compile_check import CheckedProgram, check, memory_of
from jdisagg.engine.declaration import DeclaredProgram
from jdisagg.engine.programs import ProgramTable, abstract_table
from jdisagg.parallel.submesh import Device
from jdisagg.parallel.topology import ENVIRONMENT, check_compiler, devices_of

LLAMA_3_8B = ModelConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, 8192, rope_theta=500_000.0)
LLAMA_3_70B = replace(LLAMA_3_8B, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64)
GEMMA_2_9B = ModelConfig(
    "gemma2", 256_000, 3584, 14336, 42, 16, 8, 256, 8192,
    layer_windows=(4096, None) * 21, norms="both", norm_offset=1.0, activation="gelu_tanh", embedding_scale=3584**0.5,
    query_scale=256**-0.5, attention_soft_cap=50.0, final_soft_cap=30.0, tie_embeddings=True,
)  # fmt: skip
DEEPSEEK_V3 = ModelConfig(  # its dense layers
    "deepseek_v3", 129280, 7168, 18432, 3, 128, 1, 576, 8192, latent=Latent(512, 1536, 128, 64, 128), rotary_dim=64
)
QWEN3_30B_A3B = ModelConfig(
    "qwen3_moe", 151_936, 2048, 6144, 48, 32, 4, 128, 8192, rope_theta=1e6, qk_norm=True,
    experts=Experts(128, 8, 768, normalised=True),
)  # fmt: skip
GPT_OSS_20B = ModelConfig(
    "gpt_oss", 201_088, 2880, 2880, 24, 64, 8, 64, 8192, layer_windows=(128, None) * 12, sinks=True,
    qkv_bias=True, o_bias=True, experts=Experts(32, 4, 2880, "chosen", router_bias=True, bias=True, clamped=True),
)  # fmt: skip
MODELS = {
    "8B": LLAMA_3_8B,
    "70B": LLAMA_3_70B,
    "Gemma 2 9B": GEMMA_2_9B,
    "DeepSeek-V3": DEEPSEEK_V3,
    "Qwen3-30B-A3B": QWEN3_30B_A3B,
    "gpt-oss-20b": GPT_OSS_20B,
}
WIDEST_PAGES, PAGE_SIZE = 128, 64


def devices(target: Target) -> tuple[Device, ...]:
    """All of the target; skips where its compiler is not installed."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        check_compiler(target.chip)
    except ConfigError as error:
        pytest.skip(str(error))
    return devices_of(target)


def few_layers(
    model: str, role: Role, target: str, tp: int, stages: int, layers: int, num_pages: int, chunk_tokens: int = 128,
    weights: WeightFormat = AS_MADE, kv_dtype: str = "bfloat16", **sizes: Any,
) -> ProgramTable:  # fmt: skip
    """A worker whose model is `stages` times `layers` layers of `model`; a prefill worker has them as groups. sizes: of
    its `WorkerConfig`, where others."""
    config = replace(MODELS[model], num_layers=stages * layers)
    layout = KVLayout.of(config, PAGE_SIZE, kv_dtype, tiled=Target.parse(target).chip.platform == "tpu")
    runs = [range(stage * layers, (stage + 1) * layers) for stage in range(stages)]
    buckets = (chunk_tokens,), (WIDEST_PAGES,)
    places = stages if role.decodes else 1
    worker = WorkerConfig(WorkerId(role), role, num_pages, PAGE_SIZE, 8192, 16 * places, Stages(places), *buckets, 4)
    chips = devices(Target.parse(target))[: tp * places]
    return abstract_table(replace(worker, **sizes), config, layout, runs, chips, jnp.bfloat16, weights)


def checked_kinds(table: ProgramTable, declared: Sequence[DeclaredProgram], *kinds: str) -> list[CheckedProgram]:
    """The programs of these kinds compiled, without a complaint: pools in place, no copy, collectives as expected."""
    checked = check([(table.config.worker, each) for each in declared if each.kind in kinds], every=False)
    assert {each.declared.kind for each in checked} == set(kinds)
    assert not [(each.declared.kind, why) for each in checked for why in each.complaints]
    return checked


def assert_sound(table: ProgramTable, target: str, *kinds: str) -> None:
    """`checked_kinds`, and every device holds weights, just the pages that were counted, and the rest."""
    memory, limit = memory_of(table, checked_kinds(table, table.steps(), *kinds)), Target.parse(target).chip
    assert memory and all(stage.total_bytes < limit.memory_bytes for stage in memory), memory
    assert all(stage.kv_bytes == sum(map(table.pool_bytes, stage.stages)) for stage in memory), memory
