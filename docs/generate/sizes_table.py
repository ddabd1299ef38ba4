"""Sizes that are chosen where nobody says them, beside those that other engines take."""

from __future__ import annotations

from docs.generate.markdown import table
from jdisagg.core.default_sizes import decode_slots, page_size, step_tokens
from jdisagg.core.kv_layout import KVLayout
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.settings import Settings
from jdisagg.core.targets import CHIPS
from jdisagg.sim.model_numbers import model_of

HEAD = ("model", "devices", "slots", "tokens a step", "tokens a page", "vLLM's slots", "its tokens a step")
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


def text() -> str:
    return table(HEAD, (row(*case) for case in CASES))


def row(name: str, chip: str, tp: int) -> tuple[object, ...]:
    """Of one worker of `tp` shards in bf16, whose memory holds its weights and KV and nothing of another."""
    model, sheet = model_of(name), CHIPS[chip]
    room = _room(model, sheet.memory_bytes, tp)
    slots = decode_slots(model, tp, 1, sheet.platform, sheet, room, LONGEST).value
    tokens = step_tokens(model, tp, sheet.platform, sheet, sheet.memory_bytes).value
    page = page_size(sheet.platform, KVLayout.of(model, 1, "bfloat16", sheet.platform == "tpu"), tp, LONGEST).value
    theirs, step = VLLM[chip]
    return name, f"{tp} x {chip}", slots, f"{tokens:,}", page, f"{theirs:,}", f"{step:,}"


def _room(model: ModelConfig, memory_bytes: int, tp: int) -> int:
    held = Settings().hbm_fraction * memory_bytes - 2 * model.num_params(tp) / tp
    return int(held / (model.kv_bytes(1, tp=tp)))
