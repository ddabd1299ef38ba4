"""Compiler results of a program: compile time, bytes on one device, and the collectives between devices."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import jax
from jax.errors import JaxRuntimeError

from jdisagg.core.hardware import Collective, Sent, counted, sent_by
from jdisagg.core.schedule import Events
from jdisagg.engine.declaration import DeclaredProgram
from jdisagg.engine.hlo import parsed, read_collectives
from jdisagg.engine.runner import read_schedule

MIB = 1 << 20
TEMP_LIMIT_BYTES = 64 * MIB  # besides activations; more means that a pool or a matrix was copied


@dataclass(frozen=True, slots=True)
class CompileStats:
    """The compiler's results for one program; bytes are of one device. `why` is the reason if there is no program; then
    the numbers are 0."""

    compile_s: float
    argument_bytes: int = 0
    output_bytes: int = 0  # results that do not alias an argument
    aliased_bytes: int = 0  # donated arguments that are updated in place
    temp_bytes: int = 0
    code_bytes: int = 0
    collectives: dict[str, int] = field(default_factory=dict)
    why: str = ""
    across: tuple[Collective, ...] = ()  # all collectives, one by one
    schedule: Events = ()  # products and collectives in execution order

    def sent(self, declared: DeclaredProgram, hosts: Sequence[int]) -> Sent:
        """Returns what the busiest device sends in one step of `declared`; hosts: the host of each of its devices."""
        return sent_by(self.across, hosts, declared.loops)


def compile_declared(declared: DeclaredProgram, python: Lock) -> CompileStats:
    """Compiles a program completely for the chip of its submesh; runs nothing. A refusal is a result, not an error.
    `python` is held except during compilation, which lets other threads run."""
    start_s = time.monotonic()
    try:
        with python, jax.sharding.set_mesh(declared.submesh.mesh):
            start_s = time.monotonic()
            lowered = declared.program.lower(*declared.arguments)
        compiled = lowered.compile()
    except Exception as error:  # tracing, Mosaic, Triton and XLA each raise their own kinds
        return CompileStats(time.monotonic() - start_s, why=_first_line(error))
    seconds = time.monotonic() - start_s
    with python:
        return _read(compiled, seconds)


def _read(compiled: Any, seconds: float) -> CompileStats:
    memory = compiled.memory_analysis()
    assert memory is not None, "this backend says nothing about memory"
    module = parsed(compiled.as_text() or "")
    return CompileStats(
        seconds,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes - memory.alias_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.generated_code_size_in_bytes,
        counted(across := read_collectives(module)),
        across=across,
        schedule=read_schedule(module),
    )


def complaints(declared: DeclaredProgram, facts: CompileStats) -> list[str]:
    """Returns the faults of a program that should be sound on every target; [] if there are none."""
    if facts.why:
        return [facts.why]
    found = []
    if facts.aliased_bytes < declared.donated_bytes:
        found.append(f"{facts.aliased_bytes:,} of {declared.donated_bytes:,} donated bytes are updated in place")
    if facts.temp_bytes > TEMP_LIMIT_BYTES + declared.batch_bytes:
        found.append(f"{facts.temp_bytes / MIB:,.0f} MiB of temporaries: a pool or a matrix is copied")
    if facts.collectives != declared.collectives:
        found.append(f"collectives are {facts.collectives or 'none'}, expected {declared.collectives or 'none'}")
    return found


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kind = "" if isinstance(error, JaxRuntimeError) else f"{type(error).__name__}: "
    return kind + (lines[0] if lines else "no reason given")
