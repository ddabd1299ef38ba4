"""Sizes that are chosen where nobody says them, beside those that other engines take."""

from __future__ import annotations

from docs.generate.markdown import table
from jdisagg.core.default_sizes import decode_slots, page_size, step_tokens
from jdisagg.core.hardware import CHIPS
from jdisagg.core.layout.kv_layout import KVLayout
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.settings import Settings
from jdisagg.sim.hardware import model_of

HEAD = ("model", "devices", "slots", "tokens a step", "tokens a page", "beside", "its slots", "its tokens a step")
CASES = (
    ("llama3-8b", "a100", 1),
    ("llama3-8b", "h100", 1),
    ("llama3-70b", "h100", 4),
    ("llama3-70b", "h200", 2),
    ("llama3-8b", "v5e", 4),
    ("llama3-70b", "v5p", 4),
    ("llama3-8b", "v6e", 1),
    ("deepseek-v3", "h200", 16),
)
# `EngineArgs.get_batch_defaults` of vLLM, for its server: (sequences, tokens).
VLLM = {"a100": (256, 2048), "h100": (1024, 8192), "h200": (1024, 8192), "v5e": (256, 512), "v5p": (256, 256),
        "v6e": (256, 1024)}  # fmt: skip
LONGEST = 8192
# JetStream's guide to serving MaxText's models on a v5litepod-8, bf16: `per_device_batch_size` times 8 devices, and
# `max_prefill_predict_length`, of requests of `max_target_length` = 2,048.
JETSTREAM = {
    "llama2-7b": (4096, 11008, 32, 11),
    "llama2-13b": (5120, 13824, 40, 4),
}  # hidden size, intermediate size, layers and heads, batch a device
V5E_8, PREFILL, TARGET = 8, 1024, 2048


def text() -> str:
    return table(HEAD, (*(beside_vllm(*case) for case in CASES), *map(beside_jetstream, JETSTREAM)))


def beside_vllm(name: str, chip: str, tp: int) -> tuple[object, ...]:
    theirs, step = VLLM[chip]
    return name, *row(model_of(name), chip, tp, LONGEST), "vLLM", f"{theirs:,}", f"{step:,}"


def beside_jetstream(name: str) -> tuple[object, ...]:
    hidden, wide, layers, batch = JETSTREAM[name]
    model = ModelConfig("llama", 32000, hidden, wide, layers, layers, layers, hidden // layers, 4096)
    return name, *row(model, "v5e", V5E_8, TARGET), "JetStream", f"{V5E_8 * batch}", f"{PREFILL:,}"


def row(model: ModelConfig, chip: str, tp: int, longest: int) -> tuple[object, ...]:
    """Of one worker of `tp` shards in bf16, whose memory holds its weights and KV and nothing of another."""
    sheet = CHIPS[chip]
    room = _room(model, sheet.memory_bytes, tp)
    slots = decode_slots(model, tp, 1, sheet.platform, sheet, room, longest).value
    tokens = step_tokens(model, tp, sheet.platform, sheet, sheet.memory_bytes).value
    page = page_size(sheet.platform, KVLayout.of(model, 1, "bfloat16", sheet.platform == "tpu"), tp, longest).value
    return f"{tp} x {chip}", slots, f"{tokens:,}", page


def _room(model: ModelConfig, memory_bytes: int, tp: int) -> int:
    held = Settings().hbm_fraction * memory_bytes - 2 * model.num_params(tp) / tp
    return int(held / (model.kv_bytes(1, tp=tp)))
