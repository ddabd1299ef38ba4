"""Steps of one device with the model's matrices in every form, against the bytes that a step must read.

    python -m benchmarks.products --model=smollm2 --output=benchmarks/results/products_smollm2_cpu.json

A decode step of so many slots with 64 tokens each, and a prefill chunk of so many rows, some layers and the head in one
program: matrices [in, out] in f32 ("before"), as the platform's products want them, and rounded to each weight format.
Forms take turns. CPU seconds, and a form's part of f32's time turn by turn, are what other people's jobs disturb least.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

from benchmarks import entry, machine, report
from benchmarks.kernels_timing import Contestant, race
from benchmarks.peers.make_models import SHAPES
from jdisagg import devices
from jdisagg.core.layout.kv_layout import KVLayout
from jdisagg.core.model_config import ModelConfig, WeightFormat
from jdisagg.core.settings import Settings
from jdisagg.engine.layer_group import LayerGroupPrograms
from jdisagg.kv.pools import StagePages
from jdisagg.model.checkpoint import open_source, read_model
from jdisagg.model.params import StageSpec, load_stage
from jdisagg.model.sources import RandomSource, TensorSource
from jdisagg.named_models import located
from jdisagg.parallel.submesh import StageMesh

FLAGS = flags.FlagValues()
MODEL = flags.DEFINE_string("model", "smollm2", f"as of jdisagg.launch, or {', '.join(SHAPES)}", flag_values=FLAGS)
LAYERS = flags.DEFINE_integer("layers", 6, "of the model, the first ones", lower_bound=1, flag_values=FLAGS)
ROUNDS = flags.DEFINE_integer("rounds", 7, "turns of every form", lower_bound=1, flag_values=FLAGS)
OUTPUT = flags.DEFINE_string("output", "", "JSON file", flag_values=FLAGS)

SLOTS, CHUNKS = (1, 8, 32), (128, 512)
HELD_TOKENS, PAGE_SIZE, TABLE = 64, 32, 16  # of a slot, of a page, pages of a table
FORMS = {  # name -> weight dtype and whether matrices lie [out, in]; None: as the platform wants them
    "before": ("dtype", False),
    "float32": ("dtype", None),
    "bfloat16": ("bfloat16", None),
    "int8": ("int8", None),
}


@dataclass(frozen=True)
class Row:
    """One step in one form, milliseconds."""

    step: str
    form: str
    best_ms: float
    median_ms: float
    cpu_ms: float
    floor_ms: float  # weights over the speed of a copy measured beside it
    of_float32: float  # its time over that of f32 in the same turn, the median


def source_of(model: str, console: Console) -> tuple[ModelConfig, TensorSource]:
    if model in SHAPES:
        return SHAPES[model], RandomSource(SHAPES[model], 1234)
    place = located(Settings(model=model), console).model
    config = read_model(place)
    return config, open_source(place, "hf", config)


def first_layers(config: ModelConfig, layers: int) -> ModelConfig:
    """The model cut off behind some of its layers: a whole one takes minutes to compile in every form."""
    layers = min(layers, config.num_layers)
    return replace(config, num_layers=layers, layer_windows=config.layer_windows[:layers])


class Steps:
    """The programs over one form's weights."""

    def __init__(self, config: ModelConfig, source: TensorSource, dtype: str, out_first: bool | None) -> None:
        layers, self.submesh = range(config.num_layers), StageMesh(jax.devices()[:1])
        params = load_stage(
            source, StageSpec(config, layers, self.submesh.mesh, jnp.float32, WeightFormat(dtype), out_first)
        )
        self.group = LayerGroupPrograms(config, layers, self.submesh, params)
        layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, PAGE_SIZE, "float32")
        self.pages = StagePages(layout, layers, max(SLOTS) * TABLE, self.submesh)

    @property
    def read_bytes(self) -> int:
        """Of a step: all but an embedding that is no head, of which a row is looked up."""
        stage = self.group.params.merge(self.group.params.leaves)
        table = 0 if stage.head is None or stage.embed is None else stage.embed[...].nbytes
        return self.group.params.num_bytes - table

    def decode(self, slots: int) -> Any:
        table = 1 + np.arange(slots * TABLE, dtype=np.int32).reshape(slots, TABLE)
        state = np.array([[7] * slots, [HELD_TOKENS] * slots, [0] * slots, [1] * slots], np.int32)
        return self._step(self.group.decode_program, table, state, None)

    def prefill(self, tokens: int) -> Any:
        at = np.arange(tokens, dtype=np.int32)
        rows = np.stack([at % 97, at, 1 + at // PAGE_SIZE])
        spans = np.array([[tokens, 0], [0, tokens]], np.int32)
        table = 1 + np.arange(TABLE, dtype=np.int32)[None]
        return self._step(self.group.prefill_program, rows, spans, table, None)

    def _step(self, program: Any, *batch: Any) -> Any:
        batch = self.submesh.put(batch)

        def run() -> jax.Array:
            self.pages.pools, result = program(self.group.params.leaves, self.pages.pools, *batch)
            return result

        return run


def copy_bytes_per_s() -> Contestant:
    """A copy of 64 MiB reads as many bytes and writes them."""
    array = jnp.ones((16, 1 << 20), jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    return Contestant("copy", lambda: copy(array))


def measured(forms: dict[str, Steps], rounds: int) -> Iterator[Row]:
    for kind, sizes in (("decode", SLOTS), ("prefill", CHUNKS)):
        for size in sizes:
            contestants = [Contestant(name, getattr(steps, kind)(size)) for name, steps in forms.items()]
            *times, copy = race([*contestants, copy_bytes_per_s()], rounds)
            per_byte_s, full = copy.best_s / (2 * 64 * 2**20), times[list(forms).index("float32")]
            for (name, steps), each in zip(forms.items(), times, strict=True):
                floor_s = steps.read_bytes * per_byte_s
                best, median, cpu, floor = (
                    round(1e3 * seconds, 3) for seconds in (each.best_s, each.median_s, each.cpu_s, floor_s)
                )
                yield Row(f"{kind} {size}", name, best, median, cpu, floor, round(each.over(full), 3))


def main() -> int:
    console = Console(width=120)
    devices.prepare("cpu", 1)
    config, source = source_of(MODEL.value, console)
    config = first_layers(config, LAYERS.value)
    forms = {name: Steps(config, source, *form) for name, form in FORMS.items()}
    layers = f"{config.num_layers} layers and the head of {MODEL.value}"
    table = Table("step", "form", "best ms", "median", "CPU", "floor", "of f32", title=layers)
    rows = []
    for row in measured(forms, ROUNDS.value):
        rows.append(row)
        table.add_row(*map(str, asdict(row).values()))
    console.print(table)
    if OUTPUT.value:
        report.write_json(
            OUTPUT.value,
            {
                **machine.described(),
                "model": MODEL.value,
                "layers": config.num_layers,
                "rounds": ROUNDS.value,
                "rows": [asdict(row) for row in rows],
            },
        )
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
