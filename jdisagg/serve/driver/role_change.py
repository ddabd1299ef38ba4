"""Changes a worker's role or mesh shape while the other workers serve.

Slow work runs on a thread of its own: weights are resharded and programs compiled. Programs of executors that serve are
warmed on the driver's thread, one by one between its rounds, because only that thread may use their pages.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import jax

from jdisagg.core.model_config import NAMES, WeightFormat
from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.engine.declaration import DeclaredProgram
from jdisagg.engine.mesh_executor import (
    MeshExecutor,
    ReshapeTarget,
    compile_cold,
    programs_with,
    read_anew,
    reshaped,
    shape_of,
)
from jdisagg.model import calibration, products
from jdisagg.model.names import matrix_leaves
from jdisagg.parallel.topology import machine_name
from jdisagg.serve.deploy.deployment import Deployment

log = logging.getLogger("jdisagg.driver")

Call = Callable[[Callable[[], None]], None]  # runs a function on the driver's thread and waits for its end


class Reshaper(Protocol):
    """Rebuilds executors and puts them into the driver's mapping. Called on a thread of its own."""

    def reshape(self, worker: WorkerId, config: WorkerConfig, call: Call) -> tuple[WorkerConfig, str]:
        """Returns the configuration of the worker's warm executor, and why it is not `config`; "" if it is."""
        ...


@dataclass(frozen=True, slots=True)
class ReshapeTimes:
    """The cost of a change in seconds and bytes; `read_again` names weights read from the checkpoint again."""

    reshard_s: float
    compile_s: float
    warm_s: float
    moved_bytes: int
    num_programs: int  # programs that were not warm
    read_again: tuple[str, ...] = ()


@dataclass
class MeshReshaper:
    """Rebuilds mesh executors in `machines`, a mapping that the driver reads.

    `shape` returns the executor's shape for a configuration. `remote_programs` returns the programs that shipments to
    and from other processes need. `became` is called with the new executor on the driver's thread, before its actor
    gets the event.
    """

    machines: MutableMapping[WorkerId, MeshExecutor]
    shape: Callable[[WorkerConfig], ReshapeTarget]
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

    def _change(self, old: MeshExecutor, shape: ReshapeTarget, call: Call) -> None:
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
        """Warms and installs the executor. Returns the compilation's end time and the number of cold programs."""
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


# Remembered measurements of --weight_dtype=auto, stored beside the compiled programs.
#
# A choice is valid while all inputs are the same: every byte of the model, the mesh, the settings, the machine and its
# number of cores, the versions, and the code that measures. After a damaged file the choice is measured again.

MEASURING = (calibration, products, products)  # modules whose source is part of the key
PACKAGES = ("jdisagg", "jax", "jaxlib")

weights_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """The format of the weight matrices, the reason in one line, and the date of the measurement (ISO 8601)."""

    weights: WeightFormat
    why: str
    date: str


def choices_folder() -> Path | None:
    """Returns this machine's folder of the compile cache; None without a cache."""
    cache = jax.config.values.get("jax_compilation_cache_dir")
    if not cache or not jax.config.values.get("jax_enable_compilation_cache"):
        return None
    return Path(cache) if Path(cache).name == machine_name() else Path(cache) / machine_name()


@dataclass(frozen=True)
class ChoiceMemory:
    """Stores the choice for `key` in a file of `folder`; with None as folder it stores nothing."""

    folder: Path | None
    key: dict[str, Any]
    matrices: frozenset[str]  # names of the model's weight matrices

    @classmethod
    def of(cls, deployment: Deployment, folder: Path | None) -> ChoiceMemory:
        return cls(folder, key_of(deployment), frozenset(matrix_leaves(deployment.model)))

    def find(self) -> Choice | None:
        try:
            stored = json.loads(self._path().read_text(encoding="utf-8")) if self.folder is not None else {}
        except (OSError, ValueError):
            return None
        return self._choice(stored) if isinstance(stored, dict) and stored.get("key") == self.key else None

    def keep(self, choice: Choice) -> None:
        """Stores the choice. Logs a warning if the folder cannot be written; the next start then measures again."""
        if self.folder is None:
            return
        weights = {"dtype": choice.weights.dtype, "full": sorted(choice.weights.full)}
        text = json.dumps({"key": self.key, **weights, "why": choice.why, "date": choice.date}, indent=1)
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile("w", dir=self.folder, delete=False, encoding="utf-8") as file:
                file.write(text)
            os.replace(file.name, self._path())
        except OSError as error:
            weights_log.warning(
                "what was measured of the weights is not kept for the next start: %s", error.strerror or error
            )

    def _path(self) -> Path:
        assert self.folder is not None
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()[:16]
        return self.folder / f"weights-{digest}.json"

    def _choice(self, stored: dict[str, Any]) -> Choice | None:
        dtype, full, why, day = (stored.get(name) for name in ("dtype", "full", "why", "date"))
        if dtype not in NAMES or not isinstance(why, str) or not isinstance(day, str) or not isinstance(full, list):
            return None
        known = all(isinstance(each, str) and each in self.matrices for each in full)
        return Choice(WeightFormat(dtype, frozenset(full)), why, day) if known else None


def key_of(deployment: Deployment) -> dict[str, Any]:
    code = b"".join(Path(str(module.__file__)).read_bytes() for module in MEASURING)
    return {
        "model": deployment.identity.fingerprint,
        "mesh": str(deployment.mesh),
        "asked": deployment.weight_dtype,
        "dtype": deployment.dtype,
        "rows": deployment.sizes.max_num_seqs,
        "machine": machine_name(),
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in PACKAGES},
        "code": hashlib.sha256(code).hexdigest()[:16],
    }
