"""What the launcher prints before *ready*: the model, the meshes as a picture, capacities, and the compile bar."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from jdisagg.core.ledger import PARTS, Ledger
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.model.checkpoint import storage_line
from jdisagg.serve.deployment import Deployment, sharing_warnings


def show(console: Console, deployment: Deployment, platform: str, load_format: str, sized: bool = True) -> None:
    """Prints the whole deployment once, `sized`: with its workers' room. Raises `CheckpointError` where what is stored
    cannot be told."""
    model = f"{deployment.model_name}: {_model_line(deployment.model)}, {deployment.dtype}, {deployment.model_folder}"
    console.print(f"[bold]model[/]    {model}")
    stored = (
        storage_line(deployment.model_folder, deployment.dtype, deployment.weights) if load_format == "hf" else None
    )
    if stored is not None:
        console.print(f"[bold]weights[/]  {stored}", highlight=False)
    used = len(deployment.mesh.on_device())
    console.print(f"[bold]mesh[/]     {deployment.mesh} on {used} {platform} device{'s' * (used > 1)}")
    for line in picture(deployment):
        console.print(f"         {line}", highlight=False)
    for line in sharing_warnings(deployment.mesh):
        console.print(f"[bold yellow]warning[/]  {line}", highlight=False)
    kv = deployment.kv
    console.print(
        f"[bold]kv[/]       {kv.bytes_per_token:,} bytes a token ({kv.dtype}), pages of {kv.page_size} tokens,"
        f" sequences up to {deployment.max_model_len:,} tokens"
    )
    for reason in deployment.sizes.reasons if sized else ():
        console.print(f"[bold]sizes[/]    {reason}", highlight=False)
    for config in deployment.workers if sized else ():
        tokens = config.num_pages * config.page_size
        size = config.num_pages * deployment.layout(config.role).held_page_bytes(deployment.place(config.worker).tp)
        console.print(f"         {config.worker}: {tokens:,} tokens ({config.num_pages:,} pages, {_mib(size)})")
    for config in deployment.workers if sized else ():
        console.print(f"[bold]compile[/]  {config.worker}: {_programs(config, deployment)}")


def show_weights(console: Console, line: str) -> None:
    """What loading decided about the matrices."""
    console.print(f"[bold]weights[/]  {line}", highlight=False)


def picture(deployment: Deployment) -> list[str]:
    """Each worker's devices, stage by stage; shards of one stage stand in one bracket."""
    lines, places = [], deployment.mesh.workers()
    last_prefill = next((place.worker for place in reversed(places) if place.role == "prefill"), None)
    for place in places:
        rows = [place.device_ids[stage * place.tp : (stage + 1) * place.tp] for stage in range(place.pp)]
        runs = deployment.layers_of(place) if place.pp > 1 else (range(deployment.model.num_layers),)
        boxes = [
            f"[{' '.join(str(device) for device in row)}] layers {run.start}-{run.stop - 1}"
            for row, run in zip(rows, runs, strict=True)
        ]
        lines.append(f"{place.worker:<12} " + " -> ".join(boxes))
        if place.worker == last_prefill:
            lines += ["     |  KV pages, shard by shard", "     v"]
    return lines


def _model_line(model: ModelConfig) -> str:
    return (
        f"{model.family}, {model.num_params() / 1e6:,.1f} M parameters, {model.num_layers} layers,"
        f" {model.num_heads}/{model.num_kv_heads} heads x {model.head_dim}"
    )


def _programs(config: WorkerConfig, deployment: Deployment) -> str:
    widths = "/".join(str(width * config.page_size) for width in config.table_buckets)
    parts = []
    if config.computes_prompts:
        chunks = "/".join(map(str, config.prefill_buckets))
        parts.append(f"prefill chunks of {chunks} tokens x {_runs(config)}")
    if config.role.decodes:
        stages = f"{config.num_microbatches} stages"
        if config.ring_stages > 1:
            stages = f"a ring of {config.ring_stages}, {config.decode_turns} turns"
        elif config.joint_stages > 1:
            stages = f"{config.joint_stages} stages, {config.decode_turns} turns"
        elif config.takes_turns:
            stages = f"1 stage, {config.decode_turns} turns"
        forced = f" + {config.forced_tokens} rows of forced tokens" if config.forced_tokens else ""
        parts.append(f"decode of {config.stage_slots} slots x {stages} x {widths} tokens{forced}")
    return ", ".join(parts)


def _runs(config: WorkerConfig) -> str:
    if config.prefill_stages > 1:
        return f"{config.prefill_stages} stages"
    return f"{max(1, len(config.layer_groups))} layer groups"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):,.0f} MiB"


def compile_bar(console: Console) -> tuple[Progress, Callable[[str, int, int], None]]:
    """A progress bar and the function that moves it: (program's name, programs done, programs in all)."""
    bar = Progress(
        TextColumn("[bold]warm[/]    "),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
    )
    task = bar.add_task("", total=None)
    return bar, lambda name, done, total: bar.update(task, description=name, completed=done, total=total)


def ledger_table(ledger: Ledger, num_tokens: int) -> Table:
    """Where one request's time went; the parts sum exactly to the whole."""
    table = Table("part", "ms", "share", title=f"{num_tokens} tokens", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    parts, total = ledger.parts_ns(), ledger.total_ns
    for part in PARTS:
        table.add_row(part, f"{parts[part] / 1e6:.3f}", f"{100 * parts[part] / max(total, 1):.1f} %")
        if part == "transfer" and ledger.wire_ns:
            hidden_ns, _ = ledger.transfer_ns()
            table.add_row("  hidden behind prefill", f"({hidden_ns / 1e6:.3f})", "")
    table.add_section()
    table.add_row("whole", f"{total / 1e6:.3f}", "100 %")
    return table
