"""Live: a worker's machine becomes another, while the others serve.

What takes long happens on a thread of its own: weights are cut anew, programs compiled. Programs of machines that serve
run on the driver's thread, one by one between its rounds: nobody else may touch their pages.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.engine.declaration import DeclaredProgram
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.engine.reshape import Shape, compile_cold, programs_with, read_anew, reshaped, shape_of

log = logging.getLogger("jdisagg.driver")

Call = Callable[[Callable[[], None]], None]  # has the driver's thread call it, and waits until it has


class Reshaper(Protocol):
    """Makes machines anew, and puts them where the driver finds them. Called on a thread of its own."""

    def reshape(self, worker: WorkerId, config: WorkerConfig, call: Call) -> tuple[WorkerConfig, str]:
        """What the worker's machine, warm, is now, and why it is not what was asked for; "" where it is."""
        ...


@dataclass(frozen=True, slots=True)
class ReshapeTimes:
    """What a change cost, in seconds and bytes; `read_again`: weights that could not be cut anew in place."""

    reshard_s: float
    compile_s: float
    warm_s: float
    moved_bytes: int
    num_programs: int  # that were not warm
    read_again: tuple[str, ...] = ()


@dataclass
class MeshReshaper:
    """Of real machines, which the driver shares. `shape`: how a config's machine is cut.

    `remote_programs` are those it needs for workers of other processes; `became` is told of it on the driver's thread,
    before its actor is.
    """

    machines: MutableMapping[WorkerId, MeshExecutor]
    shape: Callable[[WorkerConfig], Shape]
    remote_programs: Callable[[MeshExecutor], Sequence[DeclaredProgram]] = lambda machine: ()
    became: Callable[[MeshExecutor], None] = lambda machine: None
    times: dict[WorkerId, ReshapeTimes] = field(default_factory=dict[WorkerId, ReshapeTimes])

    def reshape(self, worker: WorkerId, config: WorkerConfig, call: Call) -> tuple[WorkerConfig, str]:
        old = self.machines[worker]
        if config == old.config:
            return config, ""
        before = shape_of(old)
        try:
            self._change(old, self.shape(config), call)
            return config, ""
        except Exception as error:
            log.exception("%s cannot become %s", worker, config.role)
            self._warm(read_anew(old, before), call)
            return before.config, f"{type(error).__name__}: {error}"

    def _change(self, old: MeshExecutor, shape: Shape, call: Call) -> None:
        began_s = time.perf_counter()
        machine, held = reshaped(old, shape)
        cut_s = time.perf_counter()
        compiled_s, count = self._warm(machine, call)
        done_s = time.perf_counter()
        again = tuple(held.read_again)
        self.times[shape.config.worker] = ReshapeTimes(
            cut_s - began_s, compiled_s - cut_s, done_s - compiled_s, held.moved_bytes, count, again
        )

    def _warm(self, machine: MeshExecutor, call: Call) -> tuple[float, int]:
        """Makes it ready and puts it in its place. When all was compiled, and how many programs were not warm."""
        others = [each for name, each in self.machines.items() if name != machine.config.worker]
        remote = [(machine, each) for each in self.remote_programs(machine)]
        cold = compile_cold([*programs_with(machine, others), *remote])
        compiled_s = time.perf_counter()
        for owner, program in cold:
            call(lambda owner=owner, program=program: owner.warm_one(program))
        call(lambda: self._put(machine))
        return compiled_s, len(cold)

    def _put(self, machine: MeshExecutor) -> None:
        self.machines[machine.config.worker] = machine
        self.became(machine)
