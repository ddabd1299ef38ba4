"""The launcher's terminal output: the deployment, one answer with its ledger, or a conversation."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from jdisagg.core.errors import RequestError, TooLong
from jdisagg.core.events import Finish
from jdisagg.core.labels import LONGEST_LABEL, NAMES, Labels
from jdisagg.core.ledger import PARTS, Ledger
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.request import FinishReason, SamplingParams
from jdisagg.core.settings import Settings
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.model.checkpoint import storage_line
from jdisagg.serve.deploy.deployment import Deployment, sharing_warnings
from jdisagg.serve.driver.service import Service
from jdisagg.serve.frontends import offline
from jdisagg.serve.frontends.offline import Prompt

# The output before *ready*: the model, the meshes as a picture, capacities, and the compile bar.


def show(
    console: Console,
    deployment: Deployment,
    platform: str,
    load_format: str,
    sized: bool = True,
    is_identified: bool = True,
) -> None:
    """Prints the whole deployment. `sized`: with the workers' capacity. `is_identified`: with the fingerprint, for
    which every byte of the model is read. Raises `CheckpointError` if the stored format is unknown."""
    model = f"{deployment.model_name}: {_model_line(deployment.model)}, {deployment.dtype}, {deployment.model_folder}"
    console.print(f"[bold]model[/]    {model}")
    if is_identified:
        console.print(f"[bold]identity[/] {deployment.identity_line}", highlight=False)
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
    """Prints how the matrices were loaded."""
    console.print(f"[bold]weights[/]  {line}", highlight=False)


def picture(deployment: Deployment) -> list[str]:
    """Draws each worker's devices, stage by stage; shards of one stage are in one bracket."""
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
        if config.is_ring:
            stages = f"a ring of {config.decode.n}, {config.decode.steps_per_dispatch} steps per dispatch"
        elif config.is_pipelined_multi_step:
            stages = f"{config.decode.n} stages, {config.decode.steps_per_dispatch} steps per dispatch"
        elif config.is_multi_step:
            stages = f"1 stage, {config.decode.steps_per_dispatch} steps per dispatch"
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
    """Returns a progress bar and its update function: (program's name, programs done, all programs)."""
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
    """Returns the ledger of one request; the parts sum exactly to the whole."""
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


FAILED = 1
YOU = "> "


def sampling_of(settings: Settings) -> SamplingParams:
    return SamplingParams(max_tokens=settings.max_tokens, temperature=settings.temperature, seed=settings.seed)


async def complete_one(service: Service, settings: Settings, console: Console) -> int:
    """Streams one answer to stdout, then prints its ledger. Returns the exit code. The answer is a chat's if the model
    has a template, else a continuation of --prompt, which is printed before it."""
    if settings.raw_prompt or not service.tokenizer.has_chat_template:
        prompt: Prompt = settings.prompt
        num_tokens = len(service.tokenizer.encode(settings.prompt))
        print(settings.prompt, end="", flush=True)
    else:
        prompt, _ = await _chat_prompt(service, [_message("user", settings.prompt)], settings)
        num_tokens = len(prompt)
    answer = Answer()
    await answer.stream(service, prompt, _fitting(service, settings, num_tokens))
    print(flush=True)
    if answer.finish is None:
        return 0
    console.print(ledger_table(answer.finish.ledger, answer.num_tokens))
    return _failed(answer.finish)


def _failed(finish: Finish) -> int:
    if finish.reason is not FinishReason.ERROR:
        return 0
    print(f"jdisagg: the answer ended early: {finish.detail}", file=sys.stderr)
    return FAILED


def _message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


async def _chat_prompt(service: Service, messages: offline.Messages, settings: Settings) -> tuple[Prompt, Any]:
    return await offline.chat_prompt(service, messages, sampling_of(settings))


def _fitting(service: Service, settings: Settings, num_tokens: int) -> SamplingParams:
    """Returns the sampling parameters, with no more tokens than the model has left after the prompt."""
    room = max(1, service.max_model_len - num_tokens)
    return sampling_of(replace(settings, max_tokens=min(settings.max_tokens, room)))


@dataclass(slots=True)
class Answer:
    """One answer as it is printed, with the times of its tokens."""

    text: str = ""
    num_tokens: int = 0
    began_s: float = field(default_factory=time.perf_counter)
    first_s: float | None = None
    last_s: float = 0.0
    finish: Finish | None = None

    async def stream(self, service: Service, prompt: Prompt, sampling: SamplingParams) -> None:
        async with aclosing(offline.stream(service, prompt, sampling)) as pieces:
            async for piece in pieces:
                if piece.delta.sampled:
                    self.last_s = time.perf_counter()
                    self.first_s = self.last_s if self.first_s is None else self.first_s
                    self.num_tokens += len(piece.delta.sampled)
                self.text += piece.text
                print(piece.text, end="", flush=True)
                self.finish = piece.finish or self.finish

    def summary(self, num_prompt_tokens: int) -> str:
        """Returns one line: time to the first token, tokens per second after it, reused tokens, and the handoff."""
        if self.first_s is None:
            return "stopped before its first token"
        parts = [f"first token after {1000 * (self.first_s - self.began_s):,.0f} ms", f"{self.num_tokens} tokens"]
        if self.num_tokens > 1 and self.last_s > self.first_s:
            parts[1] += f" at {(self.num_tokens - 1) / (self.last_s - self.first_s):,.1f} tokens/s"
        if self.finish is None:
            return ", ".join([*parts, "stopped"])
        ledger = self.finish.ledger
        return ", ".join(
            [*parts, f"{ledger.cached_tokens} of {num_prompt_tokens} prompt tokens reused", _handoff(ledger)]
        )


def _handoff(ledger: Ledger) -> str:
    hidden_ns, exposed_ns = ledger.transfer_ns()
    if not ledger.wire_ns:
        return "no handoff"
    return f"handoff {exposed_ns / 1e6:.1f} ms and {hidden_ns / 1e6:.1f} ms hidden behind prefill"


class Lines:
    """Lines of a stream, read by a thread on request, so that the event loop does not block."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    async def next(self) -> str | None:
        """Returns the next line without its end; None after the last."""
        loop, line_read = asyncio.get_running_loop(), asyncio.Future[str]()

        def read() -> None:
            line = self._stream.readline()
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(lambda: line_read.done() or line_read.set_result(line))

        threading.Thread(target=read, name="terminal", daemon=True).start()
        line = await line_read
        return line.rstrip("\r\n") if line else None


async def converse(service: Service, settings: Settings, console: Console, stream: TextIO | None = None) -> int:
    """Runs a conversation until the lines of `stream` (stdin) end; Ctrl-C stops the running answer."""
    source = stream or sys.stdin or io.StringIO()  # a process may have been started without stdin
    if not service.tokenizer.has_chat_template:
        raise RequestError(f"{service.model_name} has no chat template: it cannot --chat; --prompt completes", "chat")
    console.print("Ctrl-C stops an answer, Ctrl-D ends", style="dim")
    lines, messages = Lines(source), list[dict[str, Any]]()
    while (line := await _next_line(lines, source)) is not None:
        if not line.strip():
            continue
        messages.append(_message("user", line))
        try:
            prompt, _ = await _chat_prompt(service, messages, settings)
            answer = await _stream_answer(service, prompt, _fitting(service, settings, len(prompt)))
        except TooLong as error:
            console.print(f"{error}; what was said is forgotten", style="yellow", highlight=False)
            messages.clear()
            continue
        console.print(answer.summary(len(prompt)), style="dim", highlight=False)
        messages.append(_message("assistant", answer.text))
        if answer.finish is not None and _failed(answer.finish):
            return FAILED
    return 0


async def _next_line(lines: Lines, stream: TextIO) -> str | None:
    """Returns the next line; echoes it after the prompt if no terminal did."""
    print(YOU, end="", flush=True)
    with on_interrupt(lambda: print(f"\n(Ctrl-D ends)\n{YOU}", end="", flush=True)):
        line = await lines.next()
    if line is None or not stream.isatty():
        print(line or "", flush=True)
    return line


async def _stream_answer(service: Service, prompt: Prompt, sampling: SamplingParams) -> Answer:
    """Returns the answer as far as it came before Ctrl-C."""
    answer = Answer()
    streaming = asyncio.ensure_future(answer.stream(service, prompt, sampling))
    with on_interrupt(streaming.cancel), contextlib.suppress(asyncio.CancelledError):
        await streaming
    print(flush=True)
    return answer


@contextmanager
def on_interrupt(act: Callable[[], Any]) -> Iterator[None]:
    """Calls `act` on Ctrl-C for the `with` block."""
    loop = asyncio.get_running_loop()
    before = signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, act)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)


# The location of this process: --labels, else the host's name and the schedulers' variables.

# The first variable of a label that is set counts: Kubernetes' downward API (names that manifests give), SLURM's
# topology plugin and node name, and the slice variables of TPU VMs.
VARIABLES: dict[str, tuple[str, ...]] = {
    "host": ("NODE_NAME", "SLURMD_NODENAME", "HOSTNAME"),
    "rack": ("NODE_RACK",),
    "slice": ("MEGASCALE_SLICE_ID", "JOB_INDEX", "LWS_GROUP_INDEX"),
    "pod": ("NODE_BLOCK",),
}
JOBS = ("TPU_NAME", "JOBSET_NAME", "LWS_NAME")  # a slice is numbered within its job, or is the whole job
SLURM_TREE = "SLURM_TOPOLOGY_ADDR"  # as spine.leaf.node; its pattern, switch.switch.node, is in the next variable
SLURM_PATTERN = "SLURM_TOPOLOGY_ADDR_PATTERN"


def here(text: str, environment: Mapping[str, str] = os.environ, hostname: str = "", process: int = 0) -> Labels:
    """Returns the labels of this process. Raises ConfigError if `text`, the flag's value, is invalid."""
    given = Labels.parse(text)
    hostname, process = hostname or socket.gethostname(), process or os.getpid()
    by_label = {name: _first(environment, VARIABLES.get(name, ())) for name in NAMES} | _slurm(environment)
    by_label["host"] = by_label["host"] or _clean(hostname)
    by_label["slice"] = _clean("/".join(filter(None, (_first(environment, JOBS), by_label["slice"]))))
    by_label["process"] = _clean(f"{hostname}/{process}")
    return replace(given, **{name: value for name, value in by_label.items() if value and not getattr(given, name)})


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> str:
    return _clean(next((environment[name] for name in names if environment.get(name)), ""))


def _slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the switches of SLURM's topology tree: the one above the node is its rack, the topmost its pod."""
    levels = environment.get(SLURM_PATTERN, "").split(".")
    switches = [
        name
        for kind, name in zip(levels, environment.get(SLURM_TREE, "").split("."), strict=False)
        if kind == "switch" and name
    ]
    named = {"rack": switches[-1]} if switches else {}
    return {name: _clean(value) for name, value in (named | ({"pod": switches[0]} if switches[1:] else {})).items()}


def _clean(text: str) -> str:
    """Replaces characters that a label cannot have, since schedulers' values are not the user's mistake."""
    return "".join(each if each.isprintable() and each not in ", =" else "-" for each in text)[:LONGEST_LABEL]
