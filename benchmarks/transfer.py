"""What shipping KV costs a request: prompt length x transfer mode x emulated link, hidden, exposed and felt.

    python -m benchmarks.transfer [--links=0.25,1,10,25,100,200] [--chunks=1,2,4,8,16] [--rounds=5] [--output=FILE]

One stack in this process, real programs, and a link between the meshes that is as slow as it is told to be: a part's
bytes go on the wire when they are packed, one part behind the other, and land when the link says so. Every cell is the
median over rounds that visit all cells in turn; `whole` is the baseline of the others. Run it on a quiet machine.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
from absl import flags
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import machine as this_machine
from benchmarks.transfer_plot import plot_exposed
from jdisagg import devices
from jdisagg.core.request import Request, RequestId, SamplingParams, WorkerId
from jdisagg.core.settings import Settings
from jdisagg.core.steps import KVTransfer
from jdisagg.core.worker_config import TransferMode
from jdisagg.engine.mesh_executor import MeshExecutor, MeshShipment
from jdisagg.kv.transport.config import EmulatedLink
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.policy.router.router import Router
from jdisagg.policy.worker.worker import Worker
from jdisagg.serve.deploy.assemble import load_executors, router_config, warm
from jdisagg.serve.deploy.deployment import mesh_of, resolve_deployment
from jdisagg.serve.driver.local_service import LocalService

TARGET = 0.10  # of the transfer exposed, for prompts of `LONG_CHUNKS` chunks and more on links that keep up
LONG_CHUNKS = 4
LESSONS = 4  # requests of each length before `auto` is measured
MODES = (TransferMode.WHOLE, TransferMode.CHUNK, TransferMode.LAYER, TransferMode.AUTO)


@dataclass(frozen=True)
class SlowShipment:
    """A shipment that also has to cross the link; the bytes go on the wire when they are packed."""

    shipment: MeshShipment
    link: EmulatedLink
    sent_s: list[float]

    @property
    def transfer(self) -> KVTransfer:
        return self.shipment.transfer

    @property
    def landed(self) -> Any:
        return self.shipment.landed

    def wait_packed(self) -> None:
        self.shipment.wait_packed()
        self.sent_s.append(time.monotonic())

    def wait(self) -> None:
        self.shipment.wait()
        lands_s = self.link.send(self.sent_s[0], self.shipment.packed_bytes)
        time.sleep(max(0.0, lands_s - time.monotonic()))


class LinkedMachine:
    """A machine behind a link: everything else is the machine's own."""

    def __init__(self, inner: MeshExecutor, link: EmulatedLink) -> None:
        self.inner, self.link = inner, link

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def check(self, shipment: SlowShipment) -> Any:
        return self.inner.check(shipment.shipment)

    def ship(self, transfer: KVTransfer, destination: LinkedMachine) -> SlowShipment:
        return SlowShipment(self.inner.ship(transfer, destination.inner), self.link, [])


@dataclass(frozen=True, slots=True)
class Cell:
    """One request, as its ledger has it. Milliseconds."""

    gbit_per_s: float
    chunks: int
    mode: str
    prefill_ms: float
    hidden_ms: float
    exposed_ms: float
    first_step_ms: float
    ttft_ms: float
    wire_ms: float  # that the link alone needs for these bytes
    added_ms: float = 0.0  # see `compared`
    whole_ms: float = 1.0  # what `whole` exposes of the same prompt: the transfer with nothing to hide it

    @property
    def second_token_ms(self) -> float:
        """After the first: where stages admit one by one, its first step begins before the transfer ends."""
        return self.exposed_ms + self.first_step_ms

    @property
    def share(self) -> float:
        """Of the transfer, what the second token waits for."""
        return self.added_ms / self.whole_ms


class Stack:
    """Machines once; a router and workers for every mode and link."""

    def __init__(self, settings: Settings) -> None:
        mesh = mesh_of(settings)
        found = devices.prepare(settings.platform, mesh.num_devices)
        self.settings, self.deployment = settings, resolve_deployment(settings, found[0].platform, None)
        self.tokenizer = Tokenizer(self.deployment.model_folder)
        self.machines = load_executors(self.deployment, settings, found)
        warm(self.machines, lambda name, done, total: None)

    @property
    def chunk_tokens(self) -> int:
        return self.deployment.workers[0].prefill_buckets[-1]

    def service(self, mode: TransferMode, link: EmulatedLink) -> LocalService:
        configs = {config.worker: replace(config, transfer=mode) for config in self.deployment.workers}
        machines: dict[WorkerId, Any] = {name: LinkedMachine(each, link) for name, each in self.machines.items()}
        workers = {name: Worker(config) for name, config in configs.items()}
        router = Router(router_config(self.settings), configs.values())
        names = {"model_name": self.deployment.model_name, "model_config": self.deployment.model}
        return LocalService(
            router, workers, machines, max_model_len=self.deployment.max_model_len, tokenizer=self.tokenizer, **names
        )

    def measure(self, mode: TransferMode, gbit_per_s: float, chunks: Sequence[int]) -> list[Cell]:
        """One request of each length, one after the other, after some that are not counted: `auto` learns from them."""
        service = self.service(mode, EmulatedLink(gbit_per_s))
        service.start()
        try:
            return asyncio.run(self._ask_all(service, mode, gbit_per_s, chunks))
        finally:
            service.stop()

    async def _ask_all(
        self, service: LocalService, mode: TransferMode, gbit_per_s: float, chunks: Sequence[int]
    ) -> list[Cell]:
        for count in [*chunks] * (LESSONS if mode is TransferMode.AUTO else 1):
            await self._ask(service, mode, gbit_per_s, count)
        return [await self._ask(service, mode, gbit_per_s, count) for count in chunks]

    async def _ask(self, service: LocalService, mode: TransferMode, gbit_per_s: float, chunks: int) -> Cell:
        tokens = chunks * self.chunk_tokens - 8  # room for the output within the model's length
        prompt = tuple(2 + i % 1000 for i in range(tokens))
        name = RequestId(f"{mode}-{gbit_per_s}-{chunks}-{time.monotonic_ns()}")
        request = Request(name, prompt, SamplingParams(max_tokens=4), arrival_s=service.now_s())
        finish = None
        async for delta in service.stream(request):
            finish = delta.finish or finish
        assert finish is not None and finish.reason == "length", finish
        parts, (hidden_ns, exposed_ns) = finish.ledger.parts_ns(), finish.ledger.transfer_ns()
        size = self.deployment.kv.pages_for(tokens) * self.deployment.kv.bytes_per_page
        return Cell(
            gbit_per_s,
            chunks,
            str(mode),
            prefill_ms=parts["prefill"] / 1e6,
            hidden_ms=hidden_ns / 1e6,
            exposed_ms=exposed_ns / 1e6,
            first_step_ms=parts["first_step"] / 1e6,
            ttft_ms=(parts["queue"] + parts["reserve_wait"] + parts["prefill"]) / 1e6,
            wire_ms=size * 8 / gbit_per_s / 1e6,
        )


def medians(rounds: Sequence[Sequence[Cell]]) -> list[Cell]:
    """Cell by cell over the rounds."""
    names = ("prefill_ms", "hidden_ms", "exposed_ms", "first_step_ms", "ttft_ms", "wire_ms")
    return [
        replace(cells[0], **{name: statistics.median(getattr(cell, name) for cell in cells) for name in names})
        for cells in zip(*rounds, strict=True)
    ]


def compared(cells: Sequence[Cell]) -> list[Cell]:
    """With what the transfer adds to the second token: its time less that of a first step with all KV there.

    That step is the one of `whole` on the same link. The ledger's own exposed time counts up to the last part, though
    the first stages may be at work by then.
    """
    base = {(cell.gbit_per_s, cell.chunks): cell for cell in cells if cell.mode == TransferMode.WHOLE}
    found = []
    for cell in cells:
        whole = base[cell.gbit_per_s, cell.chunks]
        added_ms = max(0.0, cell.second_token_ms - whole.first_step_ms)
        found.append(replace(cell, added_ms=added_ms, whole_ms=whole.exposed_ms))
    return found


def verdict(cell: Cell) -> str:
    """Against the target, where it applies."""
    if cell.mode == TransferMode.WHOLE or cell.chunks < LONG_CHUNKS or cell.wire_ms >= cell.prefill_ms:
        return ""
    return "met" if cell.share <= TARGET else "missed"


def shares(cell: Cell) -> dict[str, float | str]:
    """What is reported of a cell beside its times."""
    return {"second_token_ms": cell.second_token_ms, "share": cell.share, "verdict": verdict(cell)}


def tally(cells: Sequence[Cell]) -> list[str]:
    """A line a mode: in how many of the cells where the target applies it is met."""
    found = []
    for mode in MODES[1:]:
        verdicts = [verdict(cell) for cell in cells if cell.mode == mode]
        met, missed = verdicts.count("met"), verdicts.count("missed")
        found.append(f"{mode} meets the target in {met} of the {met + missed} cells where it applies")
    return found


def table(cells: Sequence[Cell]) -> Table:
    """A row a link and length, a column a mode."""
    shown = Table(title="what the transfer adds to the second token, of its whole time (ms; * where over 10 %)")
    for name in ("link", "chunks", "prefill ms", "wire ms", *MODES):
        shown.add_column(str(name), justify="right")
    rows: dict[tuple[float, int], dict[str, Cell]] = {}
    for cell in cells:
        rows.setdefault((cell.gbit_per_s, cell.chunks), {})[cell.mode] = cell
    for (gbit_per_s, chunks), by_mode in sorted(rows.items()):
        first = next(iter(by_mode.values()))
        texts = [_text(by_mode[mode]) if mode in by_mode else "-" for mode in MODES]
        link = f"{gbit_per_s:g} Gbit/s"
        shown.add_row(link, str(chunks), f"{first.prefill_ms:.1f}", f"{first.wire_ms:.2f}", *texts)
    return shown


def _text(cell: Cell) -> str:
    mark = "*" if verdict(cell) == "missed" else ""
    return f"{cell.share:.0%} ({cell.added_ms:.1f}){mark}"


def parse(argv: Sequence[str]) -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_list("links", "0.25,1,10,25,100,200", "Gbit/s, one row each", flag_values=values)
    flags.DEFINE_list("chunks", "1,2,4,8,16", "prompt lengths in prefill chunks", flag_values=values)
    flags.DEFINE_integer("rounds", 5, "times that every cell is measured", lower_bound=1, flag_values=values)
    flags.DEFINE_string("mesh", "prefill:tp1,decode:pp3", "as for jdisagg.launch", flag_values=values)
    flags.DEFINE_integer("chunk_tokens", 128, "of a prefill chunk", flag_values=values)
    flags.DEFINE_string("model", "", "folder; empty: the embedded model", flag_values=values)
    flags.DEFINE_string("output", "", "JSON file", flag_values=values)
    flags.DEFINE_string("plot", "", "PNG file", flag_values=values)
    values(list(argv))
    return values


def main(argv: Sequence[str]) -> int:
    values = parse(argv)
    chunks, links = [int(each) for each in values.chunks], [float(each) for each in values.links]
    size = values.chunk_tokens
    settings = Settings(
        model=values.model,
        mesh=values.mesh,
        max_num_batched_tokens=size,
        prefill_buckets=str(size),
        max_model_len=max(chunks) * size,
        max_num_seqs=3,
        kv_tokens=2 * max(chunks) * size,
    )
    stack = Stack(settings)
    rounds = []
    for _ in track(range(values.rounds), description="rounds", console=Console(stderr=True)):
        cells = [stack.measure(mode, link, chunks) for link in links for mode in MODES]
        rounds.append([cell for row in cells for cell in row])
    cells = compared(medians(rounds))
    Console(width=140).print(table(cells))
    report = this_machine.described() | {"mesh": values.mesh, "chunk_tokens": size, "rounds": values.rounds}
    report |= {"model": stack.deployment.model_name, "device": jax.devices()[0].device_kind}
    report |= {"cells": [asdict(cell) | shares(cell) for cell in cells]}
    if values.output:
        Path(values.output).write_text(json.dumps(report, indent=1) + "\n")
    if values.plot:
        plot_exposed(values.plot, cells, f"{stack.deployment.model_name}, {values.mesh}, chunks of {size} tokens, CPU")
    print("\n".join(tally(cells)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
