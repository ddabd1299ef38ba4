"""Checks a worker against a chip: compiles each program shape once and sums the memory of its devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from threading import Lock

from jdisagg.core.request import WorkerId
from jdisagg.engine.compiled import CompileStats, compile_declared, complaints
from jdisagg.engine.declaration import DeclaredProgram
from jdisagg.engine.programs import ProgramTable
from jdisagg.engine.ring_declarations import RingTable

MOST_AT_ONCE = 8  # each may take gigabytes of memory
Progress = Callable[[DeclaredProgram, int, int], None]


@dataclass(frozen=True)
class CheckedProgram:
    """The result for a declared program. `alike`: compiled for this program or one that differs only in devices; else
    the facts are those of the largest program of its family, an upper bound."""

    worker: WorkerId
    declared: DeclaredProgram
    facts: CompileStats
    alike: bool
    complaints: list[str]


@dataclass(frozen=True, slots=True)
class StageMemory:
    """The memory in bytes of one device of a worker's stage. A prefill worker's layer groups share their devices and
    count as one, and so do the stages of a ring, whose program every device runs."""

    worker: WorkerId
    stages: tuple[int, ...]
    num_devices: int
    weight_bytes: int
    kv_bytes: int  # in the chip's layout, padding included
    state_bytes: int  # token counts of penalties, on the device that samples
    temp_bytes: int  # largest temporaries and results of one program
    code_bytes: int  # of all programs

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.state_bytes + self.temp_bytes + self.code_bytes


def chosen(declared: Iterable[DeclaredProgram], every: bool) -> dict[tuple, DeclaredProgram]:
    """Returns the program to compile for each key: by `like` if `every`, else the largest of each `family`."""
    picked: dict[tuple, DeclaredProgram] = {}
    for each in declared:
        key = each.like if every else each.family
        if key not in picked or (len(each.layers), each.size) > (len(picked[key].layers), picked[key].size):
            picked[key] = each
    return picked


def at_once(platforms: set[str]) -> int:
    """Returns how many programs are compiled in parallel: one per core. libtpu 0.0.42 crashes if two are for sparse
    cores."""
    return 1 if "tpu" in platforms else min(len(os.sched_getaffinity(0)), MOST_AT_ONCE)


def check(
    declared: Sequence[tuple[WorkerId, DeclaredProgram]],
    every: bool,
    progress: Progress = lambda declared, done, total: None,
) -> list[CheckedProgram]:
    """Compiles the chosen programs, see `chosen`. `progress` is called before each program."""
    picked = chosen((each for _, each in declared), every)
    python, begun = Lock(), count()

    def facts_of(each: DeclaredProgram) -> CompileStats:
        progress(each, next(begun), len(picked))
        return compile_declared(each, python)

    with ThreadPoolExecutor(at_once({each.submesh.devices[0].platform for each in picked.values()})) as threads:
        facts = dict(zip(picked, threads.map(facts_of, picked.values()), strict=True))
    found = []
    for worker, each in declared:
        key = each.like if every else each.family
        alike = picked[key].like == each.like
        wrong = complaints(picked[key], facts[key]) if picked[key] is each else []
        found.append(CheckedProgram(worker, each, facts[key], alike, wrong))
    return found


def memory_of(table: ProgramTable, checked: Sequence[CheckedProgram]) -> list[StageMemory]:
    """Returns the memory per group of devices of the worker; `checked` are all programs that run on it, transfers
    included."""
    if isinstance(table, RingTable):
        return [_ring_memory(table, checked)]
    submeshes = list(dict.fromkeys(group.submesh for group in table.layer_groups))
    return [
        _memory(table, tuple(i for i, group in enumerate(table.layer_groups) if group.submesh is submesh), checked)
        for submesh in submeshes
    ]


def _memory(table: ProgramTable, stages: tuple[int, ...], checked: Sequence[CheckedProgram]) -> StageMemory:
    here = [each for each in checked if each.declared.stage in stages]
    counts = _state_bytes(table) if len(table.layer_groups) - 1 in stages else 0
    return StageMemory(
        table.config.worker,
        stages,
        table.layer_groups[stages[0]].submesh.tp,
        sum(table.weight_bytes(stage) for stage in stages),
        sum(_kv_bytes(table, stage, here) for stage in stages),
        counts,
        max(each.facts.temp_bytes + each.facts.output_bytes for each in here),
        sum(each.facts.code_bytes for each in here),
    )


def _ring_memory(table: RingTable, checked: Sequence[CheckedProgram]) -> StageMemory:
    """Returns the memory of a ring's devices: each holds one layer per position, its share of both tables, and the
    counts of all slots."""
    stages, bare = tuple(range(table.config.decode.n)), table.pool_bytes(0)
    here = [
        each for each in checked if each.declared.stage in (0, len(stages))
    ]  # the ring's, and one stage's shipments
    turns = [each for each in here if each.declared.kind.startswith("ring") and each.alike]
    return StageMemory(
        table.config.worker,
        stages,
        len(stages) * table.layer_groups[0].submesh.tp,
        table.weight_bytes(0),
        max([bare, *(each.facts.aliased_bytes for each in turns)]),
        _state_bytes(table),
        max(each.facts.temp_bytes + each.facts.output_bytes for each in here),
        sum(each.facts.code_bytes for each in here),
    )


def _kv_bytes(table: ProgramTable, stage: int, checked: Sequence[CheckedProgram]) -> int:
    """Returns the bytes that the compiled programs alias, which are the pools in the chip's layout; else their size
    without padding."""
    bare = table.pool_bytes(stage)
    for each in checked:
        if each.declared.stage == stage and each.declared.kind in ("prefill", "decode") and each.alike:
            return max(bare, each.facts.aliased_bytes)
    return bare


def _state_bytes(table: ProgramTable) -> int:
    """Returns the bytes of token counts of decode slots and of a chunk's sequences (`Microbatch.counts`,
    `Prefiller.no_counts`)."""
    config, each = table.config, 5 * table.model.vocab_size  # bool and i32
    slots = config.num_slots if config.role.decodes else 0
    return each * (slots + (config.max_chunk_seqs if config.computes_prompts else 0))
