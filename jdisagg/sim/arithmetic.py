"""Closed-form estimates of disaggregation: published models, transfer seconds over a link, token prices.

The formulas have no queue and no fit. Bytes and FLOPs of a model come from `ModelConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jdisagg.core.errors import ConfigError
from jdisagg.core.model_config import Experts, Latent, ModelConfig

DTYPE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5}


def dense(
    family: str, num_layers: int, hidden_size: int, heads: tuple[int, int], mlp: tuple[int, int], vocab_size: int
) -> ModelConfig:
    """Returns a dense decoder with head dimension 128. `heads`: queries, KV. `mlp`: number of matrices, their width."""
    return ModelConfig(family, vocab_size, hidden_size, mlp[1], num_layers, *heads, 128, 0, mlp_matrices=mlp[0])


MODELS = {
    each.family: each
    for each in (
        dense("llama2-7b", 32, 4096, (32, 32), (3, 11008), 32000),
        dense("llama2-70b", 80, 8192, (64, 8), (3, 28672), 32000),
        dense("llama3-8b", 32, 4096, (32, 8), (3, 14336), 128256),
        dense("llama3-70b", 80, 8192, (64, 8), (3, 28672), 128256),
        dense("llama3-405b", 126, 16384, (128, 8), (3, 53248), 128256),
        dense("qwen2.5-7b", 28, 3584, (28, 4), (3, 18944), 152064),
        dense("qwen3-32b", 64, 5120, (64, 8), (3, 25600), 151936),
        dense("yi-34b", 60, 7168, (56, 8), (3, 20480), 64000),
        dense("mistral-7b", 32, 4096, (32, 8), (3, 14336), 32768),
        dense("opt-13b", 40, 5120, (40, 40), (2, 20480), 50272),
        dense("opt-66b", 64, 9216, (72, 72), (2, 36864), 50272),
        dense("bloom-176b", 70, 14336, (112, 112), (2, 57344), 250880),
        replace(
            dense("deepseek-v3", 61, 7168, (128, 128), (3, 18432), 129280),
            num_kv_heads=1,
            head_dim=576,
            latent=Latent(512, 1536, 128, 64, 128),
            experts=Experts(256, 8, 2048, "sigmoid", shared_width=2048, dense_layers=(0, 1, 2)),
        ),
    )
}


def model(name: str) -> ModelConfig:
    """Returns a model by name. Raises ConfigError with the known names."""
    if name not in MODELS:
        raise ConfigError(f"no model {name!r}; there are {', '.join(MODELS)}")
    return MODELS[name]


def number_bytes(dtype: str) -> float:
    """Returns the bytes per number, without the scales of quantised types."""
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"no dtype {dtype!r}; there are {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def transfer_s(size_bytes: float, bytes_per_s: float) -> float:
    """Returns the seconds of a transfer that has the link to itself."""
    return size_bytes / bytes_per_s


def least_reuse_bytes_per_s(config: ModelConfig, tokens: float, flops: float, dtype: str = "bfloat16") -> float:
    """Returns the bandwidth above which fetching the KV of `tokens` beats computing it at `flops` (Mooncake, eq. 2)."""
    return config.kv_bytes(tokens, number_bytes(dtype)) * flops / config.prefill_flops(tokens)


def least_disaggregation_bytes_per_s(kv_bytes: float, prefill_s: float, exposed: float = 0.0) -> float:
    """Returns the bandwidth at which a streamed handoff ends at most `exposed` x prefill_s after prefill. The link
    sends while prefill computes; at the end of prefill only one chunk's KV is left."""
    return kv_bytes / (prefill_s * (1.0 + exposed))


@dataclass(frozen=True, slots=True)
class PoolPrices:
    """Prices in USD per million tokens."""

    input_tokens: float
    uncached_input_tokens: float
    output_tokens: float


def pool_prices(
    prefill_usd_per_s: float, decode_usd_per_s: float, cached_tps: float, uncached_tps: float, output_tps: float
) -> PoolPrices:
    """Returns a pool's cost over the tokens it served within its objectives, idle time included."""
    million = 1e6
    return PoolPrices(
        prefill_usd_per_s / (cached_tps + uncached_tps) * million,
        prefill_usd_per_s / uncached_tps * million,
        decode_usd_per_s / output_tps * million,
    )
