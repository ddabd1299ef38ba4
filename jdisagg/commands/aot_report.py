"""The results of `jdisagg aot` as tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby
from math import prod
from typing import Any

from rich.console import Console
from rich.table import Table

from jdisagg.core.hardware import GIB, Collective, Joined, Sent, Shard, Target, Work, joined, ring_tick
from jdisagg.core.layout.stages import ring_cut
from jdisagg.core.mesh_spec import WorkerMesh
from jdisagg.core.schedule import Waited, waited
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.engine.compile_check import CheckedProgram, StageMemory
from jdisagg.engine.compiled import MIB
from jdisagg.engine.ring_declarations import ticks
from jdisagg.model.weight_bytes import number_bytes
from jdisagg.parallel.topology import devices_of
from jdisagg.serve.deploy.deployment import Deployment
from jdisagg.sim.expected import ExpectedTime, expected, multiplying, sending, start_s
from jdisagg.sim.hardware import ChipSpec, hardware

# The times of a compiled program: its lower bound, the bytes over the links and how much of them the schedule hides,
# and the expected time.


@dataclass(frozen=True)
class CompiledTimes:
    """The times of a deployment's programs on a target."""

    deployment: Deployment
    target: Target
    context_tokens: int  # tokens per sequence in the bounds of decode steps

    @cached_property
    def _chip(self) -> ChipSpec:
        return hardware(self.target.chip.name)

    def shard(self, place: WorkerMesh, layers: range) -> Shard:
        deployment = self.deployment
        identity = deployment.model, layers, place.tp
        return Shard(
            *identity,
            number_bytes(*identity, deployment.dtype, deployment.weights),
            deployment.kv.row_bytes / deployment.kv.head_dim,
        )

    def work(self, each: CheckedProgram) -> Work | None:
        """Returns the work of one device; None for programs without a lower bound."""
        place, config = self.deployment.place(each.worker), self._config(each.worker)
        if each.declared.kind.startswith("ring"):
            return self._ring_work(each, place, config)
        if each.declared.kind not in ("decode", "prefill", "head"):
            return None
        shard = self.shard(place, self.deployment.layers_of(place)[each.declared.stage])
        if each.declared.kind == "decode":
            width = each.declared.size * config.page_size
            return shard.decode(config.stage_slots, min(self.context_tokens, width))
        if each.declared.kind == "prefill":
            return shard.prefill(each.declared.size)
        return shard.head(config.max_chunk_seqs)

    def _ring_work(self, each: CheckedProgram, place: WorkerMesh, config: WorkerConfig) -> Work:
        """Returns the work of a whole ring dispatch."""
        numbers = ring_cut(self.deployment.model, place.pp).numbers
        shards = [self.shard(place, range(number, number + 1)) for number in numbers]
        context = min(self.context_tokens, each.declared.size * config.page_size)
        return ring_tick(shards, place.pp, config.num_slots // place.pp, context).times(ticks(config))

    def _config(self, worker: str) -> WorkerConfig:
        return next(config for config in self.deployment.workers if config.worker == worker)

    def sent(self, each: CheckedProgram) -> Sent:
        """Returns the bytes that the busiest of its devices sends in one step."""
        return each.facts.sent(each.declared, self._hosts(each))

    def links_s(self, each: CheckedProgram) -> float:
        """Returns the least seconds of its collectives, using links within and between hosts at once."""
        hosts = self._hosts(each)

        def least_s(one: Collective) -> float:
            sent, inside = one.sent(hosts), self._chip.link_bytes_per_s * self._joined(each, one).links
            repeats = prod(each.declared.loops[: one.depth])
            return repeats * max(sent.inside / inside, sent.between / self._chip.nic_bytes_per_s)

        return sum(map(least_s, each.facts.across))

    def waited(self, each: CheckedProgram) -> Waited:
        """Returns the seconds of its collectives, and how many of them the compiled schedule leaves exposed."""
        hosts, weights = self._hosts(each), self.deployment.weight_dtype

        def collective_s(one: Collective) -> float:
            links = self._joined(each, one)
            return start_s(self._chip, links) + sending(self._chip, one.sent(hosts), links)

        def seconds_of_work(work: Work) -> float:
            return multiplying(work, self._chip, weights)

        return waited(each.facts.schedule, seconds_of_work, collective_s, each.declared.loops)

    def expected(self, each: CheckedProgram) -> ExpectedTime | None:
        """Returns the expected seconds of one device by the compiled program's collectives; None if unknown."""
        work = self.work(each)
        if work is None or each.facts.why:
            return None
        return expected(work, self._chip, self.deployment.weight_dtype, self.waited(each).exposed_s)

    def _hosts(self, each: CheckedProgram) -> list[int]:
        return [self.target.host_of(self._numbers[device]) for device in each.declared.submesh.devices]

    def _joined(self, each: CheckedProgram, one: Collective) -> Joined:
        """Returns the links of the collective's first group, which stand for those of all groups."""
        devices: Sequence[Any] = each.declared.submesh.devices
        if self.target.chip.gpu is not None:
            return Joined()
        group = one.groups[0] if one.groups else range(len(devices))
        return joined(self.target, [tuple(devices[position].coords) for position in group])

    @cached_property
    def _numbers(self) -> dict[Any, int]:
        return {device: index for index, device in enumerate(devices_of(self.target))}


# Programs of one section follow each other in a table.
SECTIONS = {
    "prefill": "prefill",
    "head": "prefill",
    "score": "prefill",
    "states": "prefill",
    "decode": "decode",
    "draw": "draw",
    "ring": "ring",
}
READ_OFF = ("across", "schedule")  # facts that are reported as computed numbers instead
STEPS = {"prefill": "a chunk of a layer group", "decode": "a step of a stage", "ring plain": "a dispatch"}


@dataclass(frozen=True)
class CompileReport:
    """All results; `faults` is empty if every program compiles and fits."""

    deployment: Deployment
    target: Target
    memory_bytes: int  # memory of one device that jax may use
    context_tokens: int
    checked: list[CheckedProgram]
    memory: list[StageMemory]

    @cached_property
    def times(self) -> CompiledTimes:
        return CompiledTimes(self.deployment, self.target, self.context_tokens)

    def limit_bytes(self, stage: StageMemory) -> int:
        """Returns the memory limit of one device, divided by the number of workers on it."""
        on = self.deployment.mesh.on_device()
        return self.memory_bytes // max(len(on[device]) for device in self.deployment.place(stage.worker).device_ids)

    @cached_property
    def faults(self) -> list[str]:
        complaints = [f"{each.worker} {each.declared.label}: {why}" for each in self.checked for why in each.complaints]
        for stage in self.memory:
            over = stage.total_bytes - self.limit_bytes(stage)
            if over > 0:
                complaints.append(
                    f"{stage.worker} stage {_span(stage.stages)} does not fit: {_gib(stage.total_bytes)} of"
                    f" {_gib(self.limit_bytes(stage))} GiB a device; lower --hbm_fraction or --kv_tokens"
                )
        return complaints

    def summaries(self) -> list[str]:
        """Returns lines per worker: the lower bound of its whole step, and the rate that it allows."""
        lines = []
        for config in self.first_workers():
            checked = [each for each in self.checked if each.worker == config.worker]
            if config.role.prefills:
                lines.append(self._prefill_line(config, checked))
            if config.is_ring:
                lines.append(self._ring_line(config, checked))
            elif config.role.decodes:
                lines.append(self._decode_line(config, checked))
            lines += self._link_lines(config, checked)
            lines += self._expected_lines(checked)
        return lines

    def first_workers(self) -> list[WorkerConfig]:
        named = {each.worker for each in self.checked}
        return [config for config in self.deployment.workers if config.worker in named]

    def _floors(self, checked: list[CheckedProgram], kind: str, size: int) -> list[float]:
        works = [self.times.work(each) for each in checked if each.declared.kind == kind and each.declared.size == size]
        return [work.floor_s(self.target.chip) for work in works if work is not None]

    def _prefill_line(self, config: WorkerConfig, checked: list[CheckedProgram]) -> str:
        tokens = config.prefill_buckets[-1]
        floors, head_s = self._floors(checked, "prefill", tokens), sum(self._floors(checked, "head", tokens))
        floor_s = sum(floors) + head_s
        each_s = floor_s if config.pipeline_stages == 1 else max(*floors[:-1], floors[-1] + head_s)
        return (
            f"{config.worker}: a prompt of {tokens:,} tokens takes at least {floor_s * 1e3:.2f} ms,"
            + (f" a chunk each {each_s * 1e3:.2f} ms of {len(floors)} stages," if config.prefill_stages > 1 else "")
            + f" so at most {tokens / each_s:,.0f} tokens/s"
        )

    def _decode_line(self, config: WorkerConfig, checked: list[CheckedProgram]) -> str:
        widest = config.table_buckets[-1]
        floors = self._floors(checked, "decode", widest)
        context, slots = min(self.context_tokens, widest * config.page_size), config.stage_slots
        gap_s = max(sum(floors), config.stage_batches * max(floors))
        return (
            f"{config.worker}: {config.num_slots} sequences of {context:,} tokens get a token each"
            f" {gap_s * 1e3:.2f} ms at best ({config.stage_batches} x {slots} through {len(floors)}"
            f" stage{'s' * (len(floors) > 1)}), so at most {config.num_slots / gap_s:,.0f} tokens/s"
        )

    def _ring_line(self, config: WorkerConfig, checked: list[CheckedProgram]) -> str:
        widest, pp = config.table_buckets[-1], config.decode.n
        (floor_s, *_) = self._floors(checked, "ring plain", widest)
        context, gap_s = min(self.context_tokens, widest * config.page_size), floor_s / config.decode.steps_per_dispatch
        return (
            f"{config.worker}: {config.num_slots} sequences of {context:,} tokens get a token each"
            f" {gap_s * 1e3:.2f} ms at best ({config.decode.steps_per_dispatch} in a dispatch of {ticks(config)} ticks,"
            f" {config.num_slots // pp} at each of {pp} stages), so at most {config.num_slots / gap_s:,.0f} tokens/s"
        )

    def _link_lines(self, config: WorkerConfig, checked: list[CheckedProgram]) -> list[str]:
        """Returns a line on the step that sends the most, if any program sends."""
        kind = "ring" if config.is_ring else "decode" if config.role is Role.DECODE else "prefill"
        candidates = [each for each in checked if each.declared.kind.startswith(kind) and each.alike]
        slowest = max(candidates, key=self.times.links_s, default=None)
        if slowest is None or not slowest.facts.across:
            return []
        most, waited = self.times.sent(slowest), self.times.waited(slowest)
        inside = "NVLink" if self.target.chip.gpu else "ICI"
        step = {"ring": "dispatch", "decode": "step of a stage", "prefill": "chunk of a layer group"}[kind]
        return [
            f"{config.worker}: each {step} sends {most.inside / MIB:,.2f} MiB a device over {inside} and"
            f" {most.between / MIB:,.2f} MiB to other hosts, at least {self.times.links_s(slowest) * 1e3:.3f} ms;"
            f" {waited.hidden:.0%} of {waited.total_s * 1e3:.3f} ms are hidden behind products"
        ]

    def _expected_lines(self, checked: list[CheckedProgram]) -> list[str]:
        """Returns lines on the slowest program of each kind that was compiled itself."""
        lines = []
        for kind, step in STEPS.items():
            expectations = [self.times.expected(each) for each in checked if each.declared.kind == kind and each.alike]
            most = max((each for each in expectations if each is not None), key=lambda each: each.total_s, default=None)
            if most is not None:
                parts = f"{most.matrices_s * 1e3:.2f} of matrices, {most.kv_s * 1e3:.2f} of KV"
                lines.append(
                    f"{checked[0].worker}: {step} is expected to take {most.total_s * 1e3:.2f} ms, {parts},"
                    f" {most.collectives_s * 1e3:.2f} of exposed collectives"
                )
        return lines

    def as_json(self) -> str:
        programs = [
            {
                "worker": each.worker,
                "kind": each.declared.kind,
                "stage": each.declared.stage,
                "size": each.declared.size,
                "exact": each.alike,
                **{name: value for name, value in asdict(each.facts).items() if name not in READ_OFF},
                "sent_bytes": asdict(self.times.sent(each)),
                "links_s": self.times.links_s(each),
                "collectives_s": asdict(self.times.waited(each)),
                "expected_collectives": each.declared.collectives,
                "donated_bytes": each.declared.donated_bytes,
                "floor_s": None if (work := self.times.work(each)) is None else work.floor_s(self.target.chip),
                "expected_s": None if (found := self.times.expected(each)) is None else asdict(found),
                "complaints": each.complaints,
            }
            for each in self.checked
        ]
        stages = [
            {**asdict(stage), "total_bytes": stage.total_bytes, "limit_bytes": self.limit_bytes(stage)}
            for stage in self.memory
        ]
        document = {
            "model": self.deployment.model_name,
            "mesh": str(self.deployment.mesh),
            "target": str(self.target),
            "dtype": self.deployment.dtype,
            "kv_tokens": {each.worker: each.num_pages * each.page_size for each in self.first_workers()},
            "programs": programs,
            "stages": stages,
            "floors": self.summaries(),
            "faults": self.faults,
        }
        return json.dumps(document, indent=1)


def show_deployment(console: Console, deployment: Deployment, target: Target, memory_bytes: int) -> None:
    """Prints what will be compiled."""
    chip = target.chip
    console.print(
        f"[bold]{deployment.model_name}[/], {deployment.model.num_params() / 1e9:.1f} B parameters in"
        f" {deployment.dtype}, {deployment.mesh} on {deployment.mesh.num_devices} of {target}"
        f" ({_gib(memory_bytes)} GiB a device, {chip.memory_bytes_per_s / 1e9:,.0f} GB/s,"
        f" {chip.flops_per_s / 1e12:,.0f} TFLOP/s)",
        highlight=False,
    )
    for reason in deployment.sizes.reasons:
        console.print(f"[bold]sizes[/]  {reason}", highlight=False)


def show(console: Console, report: CompileReport) -> None:
    """Prints programs, memory, lower bounds and faults."""
    for config in report.first_workers():
        console.print(_programs(report, [each for each in report.checked if each.worker == config.worker]))
    console.print(_memory(report))
    for line in report.summaries():
        console.print(f"[bold]floor[/]  {line}", highlight=False)
    if any(not each.alike for each in report.checked):
        console.print("[bold]=[/]      no larger than another of its kind that was compiled (--all_programs: each is)")
    for fault in report.faults:
        console.print(f"[bold red]fault[/]  {fault}", highlight=False)
    if not report.faults:
        seconds = sum(each.facts.compile_s for each in _compiled(report.checked))
        console.print(f"[bold green]fits[/]   every program compiles ({seconds:.0f} s) and every device holds its part")


def _compiled(checked: list[CheckedProgram]) -> list[CheckedProgram]:
    """Returns one program for each set of facts."""
    return list({id(each.facts): each for each in checked}.values())


def _programs(report: CompileReport, checked: list[CheckedProgram]) -> Table:
    columns = (
        "program",
        "stage",
        "compiled",
        "temp MiB",
        "in place GiB",
        "collectives",
        "sent MiB",
        "hidden",
        "exposed us",
        "floor ms",
        "bound",
    )
    table = Table(*columns, title=checked[0].worker, title_justify="left")
    for column in (*table.columns[2:5], *table.columns[6:10]):
        column.justify = "right"
    shown = [each for each in checked if each.alike or report.times.work(each)]
    for _, group in groupby(shown, lambda each: SECTIONS.get(each.declared.kind.split()[0], "rest")):
        for each in group:
            table.add_row(*_row(report, each))
        table.add_section()
    return table


def _row(report: CompileReport, each: CheckedProgram) -> tuple[str, ...]:
    facts, work = each.facts, report.times.work(each)
    floor = ("", "") if work is None else _floor(work, report)
    name = each.declared.label.rpartition(",")[0]
    if facts.why:
        return name, str(each.declared.stage), "[red]no[/]", *[""] * 6, *floor
    if not each.alike:
        return name, str(each.declared.stage), "=", *[""] * 6, *floor
    across = ", ".join(f"{number} {kind}" for kind, number in sorted(facts.collectives.items())) or "none"
    mark = "[red]![/]" if each.complaints else ""
    in_place = f"{facts.aliased_bytes / GIB:.2f}" if each.declared.donated_bytes else ""
    numbers = f"{facts.compile_s:.1f} s", f"{facts.temp_bytes / MIB:,.1f}", in_place
    sent = report.times.sent(each)
    crossing = f"{sent.inside / MIB:,.2f}" + (f" + {sent.between / MIB:,.2f} between hosts" if sent.between else "")
    collectives = ("", "", "") if not facts.collectives else (crossing, *_waited(report.times.waited(each)))
    return name, str(each.declared.stage), *numbers, mark + across, *collectives, *floor


def _waited(waited: Waited) -> tuple[str, str]:
    return f"{waited.hidden:.0%}", f"{waited.exposed_s * 1e6:,.0f}"


def _floor(work: Work, report: CompileReport) -> tuple[str, str]:
    return f"{work.floor_s(report.target.chip) * 1e3:.3f}", work.bound(report.target.chip)


def _memory(report: CompileReport) -> Table:
    columns = (
        "GiB a device",
        "stage",
        "devices",
        "weights",
        "KV",
        "sampling",
        "temp",
        "code",
        "sum",
        "of",
        "KV tokens",
    )
    table = Table(*columns, title="memory", title_justify="left")
    for column in table.columns[2:]:
        column.justify = "right"
    for stage in report.memory:
        config = next(each for each in report.deployment.workers if each.worker == stage.worker)
        parts = (stage.weight_bytes, stage.kv_bytes, stage.state_bytes, stage.temp_bytes, stage.code_bytes)
        total, limit = stage.total_bytes, report.limit_bytes(stage)
        table.add_row(
            stage.worker,
            _span(stage.stages),
            str(stage.num_devices),
            *map(_gib, parts),
            f"[{'green' if total <= limit else 'red'}]{_gib(total)}[/]",
            _gib(limit),
            f"{config.num_pages * config.page_size:,}",
        )
    return table


def _span(stages: tuple[int, ...]) -> str:
    return str(stages[0]) if len(stages) == 1 else f"{stages[0]}-{stages[-1]}"


def _gib(size_bytes: Any) -> str:
    return f"{size_bytes / GIB:.2f}"
