"""What a change of a worker's role takes, and what is served meanwhile: a live stack in this process, under load.

A prefill worker becomes a decode worker and is made one of prefill again, while clients ask without a pause. Seconds
until it is drained, its weights are cut anew, programs compiled and warmed, and it has joined; tokens a second before,
and from the first word to leave to the join. The first flip compiles; later ones find programs warm.

    python -m benchmarks.role_flip --output=benchmarks/results/role_flip_cpu.json
"""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from absl import flags
from rich.console import Console
from rich.table import Table

import jdisagg
from benchmarks import entry
from benchmarks.machine import described
from jdisagg.core.events import ROUTER, ChangeRole
from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import Role
from jdisagg.serve.driver.local_service import LocalService

FLAGS = flags.FlagValues()
flags.DEFINE_string("model", "", "folder, GGUF file or name, as launch's; empty: the embedded model", flag_values=FLAGS)
flags.DEFINE_string("mesh", "prefill:2xtp1,decode:tp1", "whose prefill-1 changes", flag_values=FLAGS)
flags.DEFINE_integer("clients", 4, "that ask at once", 1, flag_values=FLAGS)
flags.DEFINE_integer("output_tokens", 24, "of an answer", 1, flag_values=FLAGS)
flags.DEFINE_integer("flips", 4, "there and back, two each", 1, flag_values=FLAGS)
flags.DEFINE_float("before_s", 5.0, "of load before each flip", 0.1, flag_values=FLAGS)
flags.DEFINE_float("drain_s", 10.0, "until what runs there is taken elsewhere", 0.0, flag_values=FLAGS)
flags.DEFINE_float("limit_s", 300.0, "of one flip", 1.0, flag_values=FLAGS)
flags.DEFINE_string("output", "", "JSON file", flag_values=FLAGS)
FLIPPED = WorkerId("prefill-1")
SIZES: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64, "page_size": 16}


@dataclass(frozen=True, slots=True)
class Row:
    """One flip; seconds."""

    role: str
    drained_s: float
    reshard_s: float
    compile_s: float
    warm_s: float
    whole_s: float  # from the word to leave to serving again
    programs: int  # that were not warm
    moved_bytes: int
    before_tokens_per_s: float
    meanwhile_tokens_per_s: float
    failed: int  # requests


@dataclass
class Load:
    """Clients that ask again as soon as they are answered."""

    llm: jdisagg.LLM
    tokens: int = 0
    failed: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, clients: int) -> list[threading.Thread]:
        threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(clients)]
        for each in threads:
            each.start()
        return threads

    def stop(self, threads: list[threading.Thread]) -> None:
        self._stop.set()
        for each in threads:
            each.join()

    def _ask(self, number: int) -> None:
        params = jdisagg.SamplingParams(max_tokens=FLAGS.output_tokens, temperature=0.0, ignore_eos=True)
        while not self._stop.is_set():
            try:
                (answer,) = self.llm.generate_all([[number + 1, 5, 9, 2] * 6], params)
                with self._lock:
                    self.tokens += len(answer.token_ids)
            except Exception:
                with self._lock:
                    self.failed += 1


def measure(llm: jdisagg.LLM, load: Load, role: Role, number: int) -> Row:
    service, tokens, began_s = llm.service, load.tokens, time.monotonic()
    assert isinstance(service, LocalService), "the stack is of this process"
    time.sleep(FLAGS.before_s)
    before = (load.tokens - tokens) / (time.monotonic() - began_s)
    config = service.pools.shapes()[FLIPPED].find(role, "tp1").config
    tokens, failed, began_s = load.tokens, load.failed, time.monotonic()
    service.driver.post(ROUTER, ChangeRole(FLIPPED, -number, config, FLAGS.drain_s))
    change = joined(service, role)
    whole_s = time.monotonic() - began_s
    at, took = change["changed_at"], change["took"]
    return Row(
        role=role,
        drained_s=at["drained"] - at["leaving"],
        reshard_s=took["reshard_s"],
        compile_s=took["compile_s"],
        warm_s=took["warm_s"],
        whole_s=at["serving"] - at["leaving"],
        programs=took["num_programs"],
        moved_bytes=took["moved_bytes"],
        before_tokens_per_s=before,
        meanwhile_tokens_per_s=(load.tokens - tokens) / whole_s,
        failed=load.failed - failed,
    )


def joined(service: LocalService, role: Role) -> dict[str, Any]:
    """What is told of the worker once it has this role. Raises TimeoutError."""
    end_s = time.monotonic() + FLAGS.limit_s
    while time.monotonic() < end_s:
        (found,) = [each for each in service.pools.described() if each["worker"] == FLIPPED]
        if found["role"] == role and found["standing"] == "serving" and "serving" in found["changed_at"]:
            return found
        time.sleep(0.01)
    raise TimeoutError(f"{FLIPPED} is not a {role} worker after {FLAGS.limit_s:g} s")


def table(rows: list[Row]) -> Table:
    shown = Table(title=f"{FLIPPED} changes its role under load")
    for name in ("to", "drained", "cut", "compiled", "warmed", "whole, s", "tokens/s before", "meanwhile", "failed"):
        shown.add_column(name, justify="right")
    for each in rows:
        seconds = (each.drained_s, each.reshard_s, each.compile_s, each.warm_s, each.whole_s)
        rates = f"{each.before_tokens_per_s:.1f}", f"{each.meanwhile_tokens_per_s:.1f}"
        shown.add_row(each.role, *(f"{value:.2f}" for value in seconds), *rates, str(each.failed))
    return shown


def main() -> int:
    named = {"model": FLAGS.model} if FLAGS.model else {}
    with jdisagg.LLM(mesh=FLAGS.mesh, **SIZES, **named) as llm:
        load = Load(llm)
        threads = load.start(FLAGS.clients)
        try:
            roles = [Role.DECODE, Role.PREFILL]
            rows = [measure(llm, load, roles[number % 2], number + 1) for number in range(FLAGS.flips)]
        finally:
            load.stop(threads)
    Console().print(table(rows))
    if FLAGS.output:
        about = {name: FLAGS[name].value for name in ("model", "mesh", "clients", "output_tokens", "drain_s")}
        report = {**described(), **about, "rows": [asdict(each) for each in rows]}
        Path(FLAGS.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
