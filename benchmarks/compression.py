"""What quantising KV for the way costs in exactness, and what it saves: the next tokens after a handoff, wire by wire.

Prompts of real code are prefilled once. For each wire their KV goes to the decode mesh by the very programs that serve,
and the text that follows is fed token by token; the distribution of every next token is compared with that after a raw
handoff of the same KV: mean Kullback-Leibler divergence (nats), and how often the likeliest token is the same.

    python -m benchmarks.compression --output=benchmarks/results/compression.json
"""

from __future__ import annotations

import json
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

from benchmarks import entry
from benchmarks.machine import described
from jdisagg import devices
from jdisagg.core.request import Attempt, RequestId, SamplingParams, WorkerId
from jdisagg.core.settings import Settings
from jdisagg.core.steps import DecodeRows, KVTransfer, PrefillChunk, PrefillChunks, StepPlan
from jdisagg.core.worker_config import RAW
from jdisagg.engine.mesh_executor import MeshExecutor, MeshShipment
from jdisagg.engine.runner import Runner
from jdisagg.kv.shipping import send, shapes_of
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.serve.deploy.assemble import load_executors
from jdisagg.serve.deploy.deployment import EMBEDDED_MODEL, mesh_of, resolve_deployment
from pallas_kernels.wire_format import WIRES

MODULES = ("argparse", "calendar", "csv", "difflib", "heapq", "shlex", "textwrap", "zipfile")
FLAGS = flags.FlagValues()
flags.DEFINE_string("model", "", "folder; empty: the embedded model", flag_values=FLAGS)
flags.DEFINE_string("mesh", "prefill:tp1,decode:tp1", "as for jdisagg.launch", flag_values=FLAGS)
flags.DEFINE_integer("prompt_tokens", 384, "of each prompt", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_integer("next_tokens", 64, "fed after each prompt", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_string("output", "", "JSON file", flag_values=FLAGS)


@dataclass(frozen=True, slots=True)
class Quality:
    """Of one wire, over all prompts and next tokens."""

    wire: str
    wire_bytes: int  # of all pieces, padding, scales and digests included
    saved: float  # of what raw pieces take
    worst_error: float  # relative, of the layer that lost most
    layer_errors: list[float]
    kl_mean: float  # nats
    kl_worst: float
    agreement: float  # of the likeliest tokens


class Stage:
    """A prefill and a decode machine, and texts in the slots of the latter."""

    def __init__(self, settings: Settings, texts: Sequence[Sequence[int]], prompt_tokens: int) -> None:
        found = devices.prepare(settings.platform, mesh_of(settings).num_devices)
        deployment = resolve_deployment(settings, found[0].platform, None)
        machines = load_executors(deployment, settings, found)
        self.source = next(each for each in machines.values() if each.config.role.prefills)
        self.destination = next(each for each in machines.values() if each.config.role.decodes)
        self.texts, self.prompt_tokens = texts, prompt_tokens
        for index in range(len(texts)):
            self._prefill(index)

    def _pages(self, machine: MeshExecutor, index: int, tokens: int) -> tuple[int, ...]:
        each = machine.config.pages_for(machine.config.max_model_len)
        return tuple(range(1 + index * each, 1 + index * each + machine.config.pages_for(tokens)))

    def _prefill(self, index: int) -> None:
        config, tokens = self.source.config, tuple(self.texts[index][: self.prompt_tokens])
        size = config.prefill_buckets[-1]
        for start in range(0, len(tokens), size):
            part = tokens[start : start + size]
            pages = self._pages(self.source, index, start + len(part))
            last = start + len(part) == len(tokens)
            chunk = PrefillChunk(RequestId(str(index)), part, start, pages, last, SamplingParams(temperature=0.0))
            chunks = PrefillChunks((chunk,), size, config.table_buckets[-1])
            self.source.run(StepPlan(0, prefill=chunks)).read()

    def ship(self, wire: str) -> tuple[int, np.ndarray]:
        """All prompts' KV as this wire: bytes of all arrays, and f32[L], what each layer lost at the worst."""
        size, lost = 0, np.zeros(self.source.model.num_layers)
        for index in range(len(self.texts)):
            transfer = KVTransfer(
                Attempt(RequestId(str(index)), 0),
                self.source.config.worker,
                WorkerId("decode"),
                self._pages(self.source, index, self.prompt_tokens),
                self._pages(self.destination, index, self.prompt_tokens),
                self.prompt_tokens,
                wire=wire,
            )
            packed = self.source.pack(transfer, shapes_of(self.destination.pages))
            landed = [send(each, self.destination.pages[each.stage]) for each in packed]
            for each in packed:
                size += sum(array.nbytes for array in each.device_arrays)
                for errors in each.slices.errors:
                    layers = slice(each.layers.start, each.layers.stop)
                    lost[layers] = np.maximum(lost[layers], np.asarray(errors).max(axis=(1, 2)))
            shipment = MeshShipment(transfer, landed, [])
            verdict = self.destination.check(shipment)
            assert verdict is None or verdict(), "what landed is not what left"
            self.destination.insert(shipment)
        return size, lost

    def next_tokens(self) -> Iterator[np.ndarray]:
        """Log-probabilities f64[prompts, V] after the prompts and each token that follows."""
        runner = self.destination.runner
        assert isinstance(runner, Runner), "stages, no ring"
        decoder = runner.decoder
        assert decoder is not None and len(decoder.microbatches) == 1, "one stage: every slot in one microbatch"
        (batch,), slots = decoder.microbatches, len(self.texts)
        total = len(self.texts[0])
        for index in range(slots):
            pages = self._pages(self.destination, index, total)
            batch.table[index, : len(pages)] = pages
        batch.tables.clear()
        for position in range(self.prompt_tokens, total):
            state = np.zeros((4, batch.size), np.int32)
            state[0, :slots] = [text[position] for text in self.texts]
            state[1, :slots], state[3, :slots] = position, 1
            batch.state = batch.put(state)
            logits = runner.activations(DecodeRows(0, (), self.destination.config.table_buckets[-1]), None)
            logits = np.asarray(logits)[:slots].astype(np.float64)
            top = logits.max(axis=-1, keepdims=True)
            yield logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))


def compare(stage: Stage, wire: str, raw: np.ndarray, raw_bytes: int) -> Quality:
    """raw: f64[turns, prompts, V]."""
    size, lost = stage.ship(wire)
    got = np.stack(list(stage.next_tokens()))
    divergence = (np.exp(raw) * (raw - got)).sum(axis=-1)
    same = (raw.argmax(axis=-1) == got.argmax(axis=-1)).mean()
    return Quality(
        wire,
        size,
        1 - size / raw_bytes,
        float(lost.max()),
        [float(each) for each in lost],
        float(divergence.mean()),
        float(divergence.max()),
        float(same),
    )


def texts_of(tokenizer: Tokenizer, tokens: int) -> list[list[int]]:
    """The first `tokens` tokens of modules of Python's library that have as many."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = [tokenizer.encode((folder / f"{name}.py").read_text(encoding="utf-8")[: 12 * tokens]) for name in MODULES]
    return [list(text[:tokens]) for text in found if len(text) >= tokens]


def table(rows: Sequence[Quality]) -> Table:
    shown = Table(title="next tokens after a handoff, against raw")
    for name in ("wire", "bytes saved", "worst layer error", "mean KL, nats", "worst KL", "same greedy token"):
        shown.add_column(name, justify="right")
    for row in rows:
        numbers = f"{row.worst_error:.3f}", f"{row.kl_mean:.2g}", f"{row.kl_worst:.2g}", f"{row.agreement:.1%}"
        shown.add_row(row.wire, f"{row.saved:.0%}", *numbers)
    return shown


def main() -> int:
    total = FLAGS.prompt_tokens + FLAGS.next_tokens
    settings = Settings(
        model=FLAGS.model,
        mesh=FLAGS.mesh,
        max_model_len=total,
        max_num_seqs=len(MODULES),
        max_num_batched_tokens=min(512, FLAGS.prompt_tokens),
        transfer_error_bound=1e9,  # every wire is to show what it does
    )
    folder = Path(settings.model) if settings.model else EMBEDDED_MODEL
    texts = texts_of(Tokenizer(folder), total)
    stage = Stage(settings, texts, FLAGS.prompt_tokens)
    raw_bytes, _ = stage.ship(RAW)
    raw = np.stack(list(stage.next_tokens()))
    rows = [compare(stage, wire, raw, raw_bytes) for wire in WIRES]
    Console().print(table(rows))
    if FLAGS.output:
        about = {"prompts": len(texts), "prompt_tokens": FLAGS.prompt_tokens, "next_tokens": FLAGS.next_tokens}
        about["raw"] = str(stage.source.pages[0].layout.dtype)
        report = {**described(), "model": settings.model or "embedded", **about, "wires": [*map(asdict, rows)]}
        Path(FLAGS.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
