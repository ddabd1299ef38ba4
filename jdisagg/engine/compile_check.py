"""A worker checked against a chip: its programs compiled, each shape once, and the memory of its devices added up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from jdisagg.core.request import WorkerId
from jdisagg.engine.abstract_programs import AbstractPrograms, Task
from jdisagg.engine.compiled import Facts, compile_task, complaints

Progress = Callable[[Task, int, int], None]


@dataclass(frozen=True)
class Checked:
    """A task and what is known of its program. `alike`: compiled for this task or one that is the same but for devices;
    else the facts are those of the largest of its family, and an upper bound."""

    worker: WorkerId
    task: Task
    facts: Facts
    alike: bool
    complaints: list[str]


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one device of a worker's stage; a prefill worker's layer groups share their devices and count as one."""

    worker: WorkerId
    stages: tuple[int, ...]
    num_devices: int
    weight_bytes: int
    kv_bytes: int  # as laid out on the chip, padding included
    state_bytes: int  # what sampling counts, on the device that draws
    temp_bytes: int  # the most that one program needs besides, its results included
    code_bytes: int  # of all programs

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.state_bytes + self.temp_bytes + self.code_bytes


def chosen(tasks: Iterable[Task], every: bool) -> dict[tuple, Task]:
    """The task to compile for each: by `like` if `every`, else by `family` with the largest of each standing in."""
    picked: dict[tuple, Task] = {}
    for task in tasks:
        key = task.like if every else task.family
        if key not in picked or (task.layers, task.size) > (picked[key].layers, picked[key].size):
            picked[key] = task
    return picked


def check(
    tasks: Sequence[tuple[WorkerId, Task]],
    every: bool,
    progress: Progress = lambda task, done, total: None,
) -> list[Checked]:
    """Compiles what has to be; see `chosen`. `progress` is called before each program."""
    picked = chosen((task for _, task in tasks), every)
    facts: dict[tuple, Facts] = {}
    for done, (key, task) in enumerate(picked.items()):
        progress(task, done, len(picked))
        facts[key] = compile_task(task)
    found = []
    for worker, task in tasks:
        key = task.like if every else task.family
        alike = picked[key].like == task.like
        wrong = complaints(picked[key], facts[key]) if picked[key] is task else []
        found.append(Checked(worker, task, facts[key], alike, wrong))
    return found


def memory_of(outline: AbstractPrograms, checked: Sequence[Checked]) -> list[StageMemory]:
    """Of each place of the worker; `checked` are all tasks that run on it, shipments included."""
    submeshes = list(dict.fromkeys(group.submesh for group in outline.layer_groups))
    return [
        _memory(outline, tuple(i for i, group in enumerate(outline.layer_groups) if group.submesh is submesh), checked)
        for submesh in submeshes
    ]


def _memory(outline: AbstractPrograms, stages: tuple[int, ...], checked: Sequence[Checked]) -> StageMemory:
    here = [each for each in checked if each.task.stage in stages]
    counts = _state_bytes(outline) if len(outline.layer_groups) - 1 in stages else 0
    return StageMemory(
        outline.config.worker,
        stages,
        outline.layer_groups[stages[0]].submesh.tp,
        sum(outline.weight_bytes(stage) for stage in stages),
        sum(_kv_bytes(outline, stage, here) for stage in stages),
        counts,
        max(each.facts.temp_bytes + each.facts.output_bytes for each in here),
        sum(each.facts.code_bytes for each in here),
    )


def _kv_bytes(outline: AbstractPrograms, stage: int, checked: Sequence[Checked]) -> int:
    """What the compiled programs alias, which is the pools as they lie on the chip; else their bare size."""
    bare = outline.pool_bytes(stage)
    for each in checked:
        if each.task.stage == stage and each.task.kind in ("prefill", "decode") and each.alike:
            return max(bare, each.facts.aliased_bytes)
    return bare


def _state_bytes(outline: AbstractPrograms) -> int:
    """Counts of every slot that decodes, and of a chunk's sequences (`Microbatch.counts`, `Prefiller.no_counts`)."""
    config, each = outline.config, 5 * outline.model.vocab_size  # bool and i32
    slots = config.num_slots if config.role.decodes else 0
    return each * (slots + (config.max_chunk_seqs if config.role.prefills else 0))
