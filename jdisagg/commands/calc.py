"""Computes KV cache sizes, their transfer time over each link, and the link speed from which disaggregation pays.

    python -m jdisagg calc --model=llama3-70b --tokens=131072 [--kv_dtype=bfloat16] [--hardware=h100 --devices=8]

Sizes are printed in decimal and binary units, bandwidths are one way, and the attention kind (MHA, GQA, MLA) is
named, since the results of the three differ by factors. For a model with experts it also prints the weights that are
active for a token, and those that larger steps read. For a draft model or a head (`--speculative`) it prints what
that takes in addition. `--model` is a name or a Hugging Face folder with its config.json; --hardware and --devices
are those of the prefill mesh.
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
from jdisagg.core.default_sizes import decode_slots, page_size, step_tokens
from jdisagg.core.hardware import CHIPS, Target
from jdisagg.core.layout.kv_layout import SCALE_BYTES, KVLayout
from jdisagg.core.model_config import AS_MADE, ModelConfig
from jdisagg.core.settings import Settings
from jdisagg.devices import usable_bytes
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
from jdisagg.sim.hardware import LINKS, Hardware, hardware


def declare() -> flags.FlagValues:
    values = flags.own()
    absl_flags.DEFINE_integer("tokens", 8192, "prompt tokens", lower_bound=1, flag_values=values)
    kinds = {"kv_dtype": list(DTYPE_BYTES)}
    flags.define(values, kinds, model="llama3-70b", kv_dtype="bfloat16", hardware="h100", devices=8, speculative="off")
    return values


@dataclass(frozen=True, slots=True)
class Guesser:
    """The memory of a draft model or a head on all devices of a worker: weights, and KV per token."""

    weight_bytes: int = 0
    token_bytes: float = 0.0


NOTHING = Guesser()


def guesser(speculative: str, name: str, config: ModelConfig, dtype: str, devices: int) -> Guesser:
    """Returns the memory of --speculative; zero if off or n-grams. Raises FlagError, ConfigError, CheckpointError."""
    folder = Path(located(Settings(model=name), Console(stderr=True)).model)
    draft_found, number = read_draft(speculative, folder, config), number_bytes(dtype)
    if draft_found is None:
        return NOTHING
    draft = draft_found[1]
    if isinstance(draft, HeadConfig):
        return Guesser(devices * head_bytes(draft, devices, "bfloat16"), draft.layer.kv_bytes(1, number))
    shard_weights = shard_bytes(draft, range(draft.num_layers), devices, "bfloat16", AS_MADE)
    return Guesser(devices * shard_weights, draft.kv_bytes(1, max(number, 2)))  # a draft's pages are not quantised


def guesser_lines(speculative: str, draft_memory: Guesser) -> list[str]:
    if not draft_memory.weight_bytes:
        return []
    weights, token = decimal(draft_memory.weight_bytes), decimal(draft_memory.token_bytes)
    return [
        f"--speculative={speculative}: up to {weights} of weights in bf16, {token} of KV a token, beside the model's"
    ]


def model_of(name: str) -> ModelConfig:
    """Returns the configuration of a named model, folder or GGUF file. Raises ConfigError or CheckpointError."""
    found = located(Settings(model=name), Console(stderr=True)).model
    path = Path(found)
    return replace(read_model(path), family=path.name) if is_gguf(path) else model_numbers.model_of(found)


def decimal(size_bytes: float) -> str:
    """Formats bytes in decimal units, as 42.95 GB."""
    return _scaled(size_bytes, 1000.0, ("B", "KB", "MB", "GB", "TB", "PB"))


def binary(size_bytes: float) -> str:
    """Formats bytes in binary units, as 40.00 GiB."""
    return _scaled(size_bytes, 1024.0, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def _scaled(size: float, step: float, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if size < step:
            return f"{size:.4g} {unit}"
        size /= step
    return f"{size:.4g} {units[-1]}"


def seconds(duration_s: float) -> str:
    """Formats seconds, as 12.3 ms."""
    if duration_s >= 1:
        return f"{duration_s:.3g} s"
    return f"{duration_s * 1e3:.3g} ms" if duration_s >= 1e-3 else f"{duration_s * 1e6:.3g} us"


def prefill_s(config: ModelConfig, tokens: int, chip: Hardware, devices: int) -> float:
    """Returns FLOPs over the peak share that large GEMMs and causal attention reach; half of all pairs are masked."""
    linear = config.num_layers * config.linear_flops(tokens)
    pairs = config.num_layers * config.attention_flops(tokens**2 / 2)
    return (linear / chip.gemm + pairs / chip.prefill_attention) / (chip.flops * devices)


def links_table(config: ModelConfig, size_bytes: float, prefill: float) -> Table:
    """Returns the transfer seconds over every link, and their share of the prefill that could hide them."""
    table = Table(title=f"{config.family}: {decimal(size_bytes)} of KV against {seconds(prefill)} of prefill")
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


STEPS = (1, 8, 64, 512)  # step sizes in tokens whose weight reads are printed


def weights_lines(config: ModelConfig) -> list[str]:
    """Returns lines on the number of weights; with experts also on those active for a token and read by a step."""
    all_weights = f"{billions(config.num_params())} weights"
    if config.experts is None:
        return [all_weights]
    body = (config.num_layers * config.read_params(tokens) + config.head_params() for tokens in STEPS)
    return [
        f"{all_weights}, {billions(config.num_active_params())} of them for a token: {config.experts.per_token} of"
        f" {config.experts.number} experts a layer",
        f"a step of {', '.join(map(str, STEPS))} tokens is expected to read {', '.join(map(billions, body))}",
    ]


def billions(weights: float) -> str:
    """Formats a number of weights, as 46.7 B."""
    return f"{weights / 1e9:.3g} B"


def sizes_lines(
    config: ModelConfig, tokens: int, dtype: str, chip: Hardware, devices: int, beside: Guesser
) -> list[str]:
    """Returns the default sizes of a worker with `devices` shards; none for a chip without a data sheet."""
    sheet, longest = CHIPS.get(chip.name), config.max_position or tokens
    if sheet is None:
        return []
    memory = usable_bytes(Target(sheet, (1,) * sheet.dimensions))
    free_bytes = Settings().hbm_fraction * memory * devices - 2 * config.num_params() - beside.weight_bytes
    room = int(free_bytes / (config.kv_bytes(1, number_bytes(dtype)) + beside.token_bytes))
    if room < longest:
        return [f"{devices} x {chip.name} hold no {longest:,} tokens of KV beside weights in bf16"]
    kv = KVLayout.of(config, 1, "bfloat16", sheet.platform == "tpu")
    chosen = (
        decode_slots(config, devices, 1, sheet.platform, sheet, room, longest),
        step_tokens(config, devices, sheet.platform, sheet, memory),
        page_size(sheet.platform, kv, devices, longest),
    )
    return [f"chosen unless said: {each.reason}" for each in chosen]


def report(
    config: ModelConfig, tokens: int, dtype: str, chip: Hardware, devices: int, beside: Guesser = NOTHING
) -> list[str | Table]:
    """Returns everything to print."""
    scale_bytes = SCALE_BYTES / config.head_dim if dtype in ("int8", "fp8") else 0.0  # per head of one token
    size, a_token = (config.kv_bytes(count, number_bytes(dtype) + scale_bytes) for count in (tokens, 1))
    prefill = prefill_s(config, tokens, chip, devices)
    pays = least_disaggregation_bytes_per_s(size, prefill)
    reuse = least_reuse_bytes_per_s(config, tokens, chip.flops * devices, dtype)
    return [
        *weights_lines(config),
        *sizes_lines(config, tokens, dtype, chip, devices, beside),
        f"{config.family} ({config.attention_kind}), {dtype}: {decimal(a_token)} = {binary(a_token)} of KV a token",
        f"{tokens} tokens: {decimal(size)} = {binary(size)}",
        f"prefill on {devices} x {chip.name}: {seconds(prefill)} ({tokens / prefill:,.0f} tokens/s)",
        links_table(config, size, prefill),
        f"a streamed handoff hides behind prefill from {decimal(pays)}/s ({pays * 8 / 1e9:,.1f} Gbit/s), one way",
        f"fetching this KV beats computing it at peak FLOP/s from {decimal(reuse)}/s (Mooncake, eq. 2)",
    ]


def run(values: flags.FlagValues) -> int:
    config = model_of(values.model)
    chip = hardware(values.hardware)
    beside = guesser(values.speculative, values.model, config, values.kv_dtype, values.devices)
    lines = report(config, values.tokens, values.kv_dtype, chip, values.devices, beside)
    for part in (*guesser_lines(values.speculative, beside), *lines):
        Console().print(part, highlight=False, soft_wrap=isinstance(part, str))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 0, or 2 with one line on the error."""
    return command.run("jdisagg calc", __doc__, declare(), argv, run)


if __name__ == "__main__":
    sys.exit(main())
