"""Computes how large a KV cache is, how long it takes over each link, and from which link on shipping it pays.

    python -m jdisagg calc --model=llama3-70b --tokens=131072 [--kv_dtype=bfloat16] [--hardware=h100 --devices=8]

Sizes are in decimal and binary units, bandwidths are one way, and the attention kind (MHA, GQA, MLA) is named, since
the answers of the three differ by factors. For a model with experts it prints how many weights act on a token, and how
many a step of more tokens reads. For a draft model or a head (`--speculative`) it prints what that takes beside the
model. `--model` is a name or a Hugging Face folder with its config.json. --hardware and --devices describe the prefill
mesh. Memory of a device, floors of a step and sizes chosen by default are printed by `python -m jdisagg aot`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from absl import flags as absl_flags
from rich.console import Console
from rich.table import Table

from jdisagg import command, flags
from jdisagg.core.layout.kv_layout import SCALE_BYTES
from jdisagg.core.model_config import AS_MADE, ModelConfig
from jdisagg.core.settings import Settings
from jdisagg.model.checkpoint import read_model
from jdisagg.model.draft_head import HeadConfig, head_bytes
from jdisagg.model.gguf.file import is_gguf
from jdisagg.model.weight_bytes import shard_bytes
from jdisagg.named_models import located
from jdisagg.serve.deploy.speculation import read_draft
from jdisagg.sim import hardware as model_numbers
from jdisagg.sim.arithmetic import (
    DTYPE_BYTES,
    least_disaggregation_bytes_per_s,
    least_reuse_bytes_per_s,
    number_bytes,
    transfer_s,
)
from jdisagg.sim.hardware import LINKS, ChipSpec, hardware


def declare() -> flags.FlagValues:
    values = flags.own()
    absl_flags.DEFINE_integer("tokens", 8192, "prompt tokens", lower_bound=1, flag_values=values)
    kinds = {"kv_dtype": list(DTYPE_BYTES)}
    flags.define(values, kinds, model="llama3-70b", kv_dtype="bfloat16", hardware="h100", devices=8, speculative="off")
    return values


@dataclass(frozen=True, slots=True)
class DraftSize:
    """The weights of a draft model or a head on all devices of a worker, and its KV per token, in bytes."""

    weight_bytes: int = 0
    token_bytes: float = 0.0


NO_DRAFT = DraftSize()


def draft_size(speculative: str, name: str, config: ModelConfig, dtype: str, devices: int) -> DraftSize:
    """Returns what --speculative adds to the model of that name; NO_DRAFT for `off` and n-grams.

    Raises FlagError, ConfigError, CheckpointError.
    """
    place = Path(located(Settings(model=name), Console(stderr=True)).model)
    found, number = read_draft(speculative, place, config), number_bytes(dtype)
    if found is None:
        return NO_DRAFT
    draft = found[1]
    if isinstance(draft, HeadConfig):
        return DraftSize(devices * head_bytes(draft, devices, "bfloat16"), draft.layer.kv_bytes(1, number))
    held = shard_bytes(draft, range(draft.num_layers), devices, "bfloat16", AS_MADE)
    return DraftSize(devices * held, draft.kv_bytes(1, max(number, 2)))  # a draft model's pages stay floats


def draft_lines(speculative: str, size: DraftSize) -> list[str]:
    """Returns the line on a draft model or a head; nothing for NO_DRAFT."""
    if not size.weight_bytes:
        return []
    weights, token = decimal(size.weight_bytes), decimal(size.token_bytes)
    return [
        f"--speculative={speculative}: up to {weights} of weights in bf16, {token} of KV a token, beside the model's"
    ]


def model_of(name: str) -> ModelConfig:
    """Returns the configuration of a named model, a folder or a GGUF file. Raises ConfigError, CheckpointError."""
    found = located(Settings(model=name), Console(stderr=True)).model
    place = Path(found)
    return replace(read_model(place), family=place.name) if is_gguf(place) else model_numbers.model_of(found)


def decimal(size_bytes: float) -> str:
    """Returns a size such as "42.95 GB"."""
    return _scaled(size_bytes, 1000.0, ("B", "KB", "MB", "GB", "TB", "PB"))


def binary(size_bytes: float) -> str:
    """Returns a size such as "40 GiB"."""
    return _scaled(size_bytes, 1024.0, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def _scaled(size: float, step: float, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if size < step:
            return f"{size:.4g} {unit}"
        size /= step
    return f"{size:.4g} {units[-1]}"


def seconds(duration_s: float) -> str:
    """Returns a duration such as "12.3 ms"."""
    if duration_s >= 1:
        return f"{duration_s:.3g} s"
    return f"{duration_s * 1e3:.3g} ms" if duration_s >= 1e-3 else f"{duration_s * 1e6:.3g} us"


def prefill_s(config: ModelConfig, tokens: int, chip: ChipSpec, devices: int) -> float:
    """Returns the prefill time: FLOPs over the share of the peak that large GEMMs and causal attention reach."""
    linear = config.num_layers * config.linear_flops(tokens)
    pairs = config.num_layers * config.attention_flops(tokens**2 / 2)  # half of all pairs are masked
    return (linear / chip.gemm + pairs / chip.prefill_attention) / (chip.flops * devices)


def links_table(title: str, size_bytes: float, prefill: float) -> Table:
    """Returns the transfer time over every link, and its share of the prefill time that can hide it."""
    table = Table(title=title)
    for name in ("link, one way", "nominal", "time", "measured", "time", "of prefill"):
        table.add_column(name, justify="left" if name == "link, one way" else "right")
    for link in LINKS:
        measured = link.measured_bytes_per_s
        best = transfer_s(size_bytes, measured or link.bytes_per_s)
        table.add_row(
            link.name,
            f"{decimal(link.bytes_per_s)}/s",
            seconds(transfer_s(size_bytes, link.bytes_per_s)),
            f"{decimal(measured)}/s" if measured else "-",
            seconds(best) if measured else "-",
            f"{best / prefill:.1%}",
        )
    return table


STEPS = (1, 8, 64, 512)  # tokens of the steps whose weight reads are printed


def expert_lines(config: ModelConfig) -> list[str]:
    """Returns how many weights act on a token and how many a step reads; nothing for a dense model."""
    if config.experts is None:
        return []
    body = (config.num_layers * config.read_params(tokens) + config.head_params() for tokens in STEPS)
    return [
        f"{billions(config.num_active_params())} of {billions(config.num_params())} weights act on a token:"
        f" {config.experts.per_token} of {config.experts.number} experts a layer",
        f"a step of {', '.join(map(str, STEPS))} tokens is expected to read {', '.join(map(billions, body))}",
    ]


def billions(weights: float) -> str:
    """Returns a number of weights such as "46.7 B"."""
    return f"{weights / 1e9:.3g} B"


def report(config: ModelConfig, tokens: int, dtype: str, chip: ChipSpec, devices: int) -> list[str | Table]:
    """Returns the lines and the table to print for a prompt of `tokens` tokens."""
    scale_bytes = SCALE_BYTES / config.head_dim if dtype in ("int8", "fp8") else 0.0  # of a row of numbers
    size, a_token = (config.kv_bytes(count, number_bytes(dtype) + scale_bytes) for count in (tokens, 1))
    prefill = prefill_s(config, tokens, chip, devices)
    pays = least_disaggregation_bytes_per_s(size, prefill)
    reuse = least_reuse_bytes_per_s(config, tokens, chip.flops * devices, dtype)
    title = f"{config.family}: {decimal(size)} of KV against {seconds(prefill)} of prefill on {devices} x {chip.name}"
    return [
        *expert_lines(config),
        f"{config.family} ({config.attention_kind}), {dtype}: {decimal(a_token)} = {binary(a_token)} of KV a token",
        f"{tokens} tokens: {decimal(size)} = {binary(size)}",
        links_table(title, size, prefill),
        f"KV transfer is fully overlapped with prefill on links of at least {decimal(pays)}/s"
        f" ({pays * 8 / 1e9:,.1f} Gbit/s), one way",
        f"fetching this KV beats computing it at peak FLOP/s from {decimal(reuse)}/s (Mooncake, eq. 2)",
    ]


def run(values: flags.FlagValues) -> int:
    config = model_of(values.model)
    chip = hardware(values.hardware)
    draft = draft_size(values.speculative, values.model, config, values.kv_dtype, values.devices)
    lines = report(config, values.tokens, values.kv_dtype, chip, values.devices)
    for part in (*draft_lines(values.speculative, draft), *lines):
        Console().print(part, highlight=False, soft_wrap=isinstance(part, str))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 with one line on what was wrong."""
    return command.run("jdisagg calc", __doc__, declare(), argv, run)


if __name__ == "__main__":
    sys.exit(main())
