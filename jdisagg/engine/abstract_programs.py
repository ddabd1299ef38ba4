"""Every program of a stack as it would be warmed, over shapes instead of arrays: to compile where nothing can run.

The programs are the engine's own (`LayerGroupPrograms`, `DrawPrograms`, `FirstDrawPrograms`, `TransferPrograms`); only
their arguments are described here once more, and a test holds this list to what a warm executor has compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from jax.typing import DTypeLike

from jdisagg.core.kv_layout import KVLayout
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.reshard import Route, StageShape, plan_routes
from jdisagg.core.worker_config import RAW, WorkerConfig
from jdisagg.engine.decode import DrawPrograms
from jdisagg.engine.layer_group import SCORE_ROWS, LayerGroupPrograms
from jdisagg.engine.mesh_executor import submeshes_of
from jdisagg.engine.prefill import FirstDrawPrograms
from jdisagg.engine.sampling import FLOAT_COLUMNS, INT_COLUMNS, Counts, SamplingMetadata
from jdisagg.kv.packing import HeadSlices
from jdisagg.kv.pools import abstract_pool
from jdisagg.kv.shipping import SLICE_SPEC, TransferPrograms, slice_shapes
from jdisagg.model.params import abstract_stage_params
from jdisagg.parallel.submesh import WHOLE, Device, Program, Submesh


@dataclass(frozen=True)
class Task:
    """One program for one set of shapes."""

    kind: str  # "prefill", "head", "score", "decode", "draw ...", "pack", "check", "insert"
    stage: int  # group of the worker that it runs on
    size: int  # of the bucket: tokens of a chunk, pages of a table or a move, rows of a draw
    program: Program
    arguments: tuple[Any, ...]
    submesh: Submesh
    layers: int = 0
    traits: tuple[Any, ...] = ()  # what else tells two tasks of one kind apart, besides the numbers above
    batch_bytes: int = 0  # of one device: what temporaries may hold of the batch itself, generously
    donated_bytes: int = 0  # of one device: what the program must update in place
    collectives: dict[str, int] = field(default_factory=dict)  # what it is expected to hold, by HLO name

    @property
    def like(self) -> tuple[Any, ...]:
        """Equal for tasks that are the same program but for the devices they run on."""
        return (*self.family, self.layers, self.size)

    @property
    def family(self) -> tuple[Any, ...]:
        """Equal for tasks that are the same program but for sizes."""
        return (self.kind, self.submesh.tp, *self.traits)


class AbstractPrograms:
    """One worker's layer groups, and the tasks that its `warm` would run; sizes and shapes only."""

    def __init__(
        self,
        config: WorkerConfig,
        model: ModelConfig,
        layout: KVLayout,
        layers: Sequence[range],
        devices: Sequence[Device],
        dtype: DTypeLike,
    ) -> None:
        """Arguments as those of `MeshExecutor`; the devices may be those of a topology."""
        self.config, self.model, self.layout, self.dtype = config, model, layout, dtype
        submeshes = submeshes_of(config.role, len(layers), devices)
        self.layer_groups = [
            LayerGroupPrograms(model, run, submesh, abstract_stage_params(model, run, submesh.mesh, dtype))
            for run, submesh in zip(layers, submeshes, strict=True)
        ]
        self.transfer_programs = {
            submesh: TransferPrograms(submesh, config.digests, config.error_bound) for submesh in submeshes
        }
        self.draws, self.first_draws = DrawPrograms(), FirstDrawPrograms()

    def tasks(self) -> list[Task]:
        """Everything this worker runs on its own; shipments are `shipments`."""
        found: list[Task] = []
        if self.config.role.prefills:
            found += [task for tokens in self.config.prefill_buckets for task in self._prefills(tokens)]
            found += self._first_draws()
        if self.config.role.decodes:
            found += [task for width in self.config.table_buckets for task in self._decodes(width)]
            found += self._draws()
        if self.config.mixed_steps and self.config.role.prefills and self.config.role.decodes:
            found += [task for tokens in self.config.prefill_buckets for task in self._mixed(tokens)]
        return found

    def weight_bytes(self, stage: int) -> int:
        """Of one device of the group."""
        return sum(local_bytes(leaf) for leaf in self.layer_groups[stage].params.leaves)

    def pool_bytes(self, stage: int, layers: int | None = None) -> int:
        """Of one device: the pages of `layers` layers of the layer group (None: all), without padding."""
        group = self.layer_groups[stage]
        return (len(group.layers) if layers is None else layers) * local_bytes(self._pool(group.submesh))

    # ------------------------------------------------------------ one kind after the other

    def _pool(self, submesh: Submesh) -> jax.ShapeDtypeStruct:
        return abstract_pool(self.layout, self.config.num_pages, submesh)

    def _group_task(self, kind: str, stage: int, size: int, rows: int, program: Program, batch: tuple) -> Task:
        group = self.layer_groups[stage]
        windows = tuple({self.model.window(layer) for layer in group.layers})
        pools = [self._pool(group.submesh)] * len(group.layers)
        sums = 2 * len(group.layers) if group.submesh.tp > 1 else 0
        gathers = _gathers(group) if kind in ("decode", "mixed") and group.is_last else {}
        return Task(
            kind,
            stage,
            size,
            program,
            (group.params.leaves, pools, *batch),
            group.submesh,
            len(group.layers),
            (group.is_first, group.is_last, windows),
            self._activation_bytes(rows, group.submesh.tp) + (self._logit_bytes(rows) if gathers else 0),
            self.pool_bytes(stage),
            {**({"all-reduce": sums} if sums else {}), **gathers},
        )

    def _prefills(self, tokens: int) -> Iterator[Task]:
        sequences, width = self.config.max_chunk_seqs, self.config.table_buckets[-1]
        for stage, group in enumerate(self.layer_groups):
            submesh = group.submesh
            ints = [(3, tokens), (2, sequences + 1), (sequences, width)]
            batch = (*(whole(submesh, shape) for shape in ints), self._activations(group, tokens))
            yield self._group_task("prefill", stage, tokens, tokens, group.prefill_program, batch)
        last, stage = self.layer_groups[-1], len(self.layer_groups) - 1
        x = whole(last.submesh, (tokens, self.model.hidden_size), self.dtype)
        for kind, program, rows in (("head", last.head_program, sequences), ("score", last.score_program, tokens)):
            arguments, room = (last.params.leaves, x, whole(last.submesh, (rows,))), 2 * local_bytes(x)
            room += self._logit_bytes(min(rows, max(sequences, SCORE_ROWS)))
            yield Task(kind, stage, tokens, program, arguments, last.submesh, 0, (), room, 0, _gathers(last))

    def _decodes(self, width: int) -> Iterator[Task]:
        slots = self.config.slots_per_microbatch
        for stage, group in enumerate(self.layer_groups):
            submesh = group.submesh
            batch = (whole(submesh, (slots, width)), whole(submesh, (4, slots)), self._activations(group, slots))
            yield self._group_task("decode", stage, width, slots, group.decode_program, batch)

    def _mixed(self, tokens: int) -> Iterator[Task]:
        """Slots with the widest table, and chunks; their logits are made with the layers."""
        config = self.config
        slots, sequences, width = config.slots_per_microbatch, config.max_chunk_seqs, config.table_buckets[-1]
        for stage, group in enumerate(self.layer_groups):
            submesh = group.submesh
            ints = [(slots, width), (4, slots), (3, tokens), (2, sequences + 1), (sequences, width)]
            batch = (*(whole(submesh, shape) for shape in ints), self._activations(group, slots + tokens))
            yield self._group_task("mixed", stage, tokens, slots + tokens, group.mixed_program, batch)

    def _activation_bytes(self, rows: int, tp: int) -> int:
        """Four copies of the residual stream in f32, and two of the widest product of a layer."""
        widest = 2 * self.model.intermediate_size // tp
        return rows * (4 * 4 * self.model.hidden_size + 2 * widest * jnp.dtype(self.dtype).itemsize)

    def _logit_bytes(self, rows: int) -> int:
        """Eight copies of the logits: sampling keeps several at once, and the least tile has eight rows."""
        return 8 * max(rows, 8) * self.model.vocab_size * 4

    def _activations(self, group: LayerGroupPrograms, rows: int) -> jax.ShapeDtypeStruct | None:
        return None if group.is_first else whole(group.submesh, (rows, self.model.hidden_size), self.dtype)

    def _first_draws(self) -> list[Task]:
        """As `Prefiller.draw`: on the first device of the last group."""
        rows, programs = self.config.max_chunk_seqs, self.first_draws
        shapes = DrawShapes(self.layer_groups[-1].submesh.devices[0], rows, self.model.vocab_size)
        positions = shapes.ints(rows)
        return [
            self._draw("draw first greedy", programs.greedy, shapes, (shapes.logits,)),
            self._draw("draw first", programs.pick, shapes, (shapes.logits, shapes.metadata, shapes.counts, positions)),
            self._draw("draw first logprobs", programs.logprobs, shapes, (shapes.logits, positions)),
        ]

    def _draws(self) -> list[Task]:
        """As `Decoder`: on the first device of the last stage."""
        rows, programs = self.config.slots_per_microbatch, self.draws
        shapes = DrawShapes(self.layer_groups[-1].submesh.devices[0], rows, self.model.vocab_size)
        state, tokens = shapes.ints(4, rows), shapes.ints(rows)
        row = (shapes.ints(), shapes.of((self.model.vocab_size,), jnp.bool_), shapes.ints(self.model.vocab_size))
        output, both = local_bytes(shapes.counts.output), sum(map(local_bytes, shapes.counts))
        return [
            self._draw("draw steer", programs.steer, shapes, (state, state)),
            self._draw("draw greedy", programs.draw_greedy, shapes, (shapes.logits, state, shapes.metadata)),
            self._draw("draw", programs.draw, shapes, (shapes.logits, state, shapes.metadata, shapes.counts)),
            self._draw("draw logprobs", programs.logprobs, shapes, (shapes.logits, tokens)),
            self._draw("draw count", programs.count, shapes, (shapes.counts, tokens), output),
            self._draw("draw set row", programs.set_row, shapes, (shapes.counts, *row), both),
        ]

    def _draw(self, kind: str, program: Program, shapes: DrawShapes, arguments: tuple, donated: int = 0) -> Task:
        stage = len(self.layer_groups) - 1
        submesh, room = Submesh([shapes.device]), self._logit_bytes(shapes.rows)
        return Task(kind, stage, shapes.rows, program, arguments, submesh, batch_bytes=room, donated_bytes=donated)


@dataclass(frozen=True)
class DrawShapes:
    """What drawing reads, on the one device that draws."""

    device: Device
    rows: int
    vocab_size: int

    def of(self, shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(self.device))

    def ints(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self.of(shape, jnp.int32)

    @property
    def logits(self) -> Any:
        return self.of((self.rows, self.vocab_size), jnp.float32)

    @property
    def metadata(self) -> Any:
        return SamplingMetadata(self.ints(self.rows, INT_COLUMNS), self.of((self.rows, FLOAT_COLUMNS), jnp.float32))  # pyright: ignore[reportArgumentType]

    @property
    def counts(self) -> Any:
        shape = (self.rows, self.vocab_size)
        return Counts(self.of(shape, jnp.bool_), self.of(shape, jnp.int32))  # pyright: ignore[reportArgumentType]


def shipments(source: AbstractPrograms, destination: AbstractPrograms) -> list[Task]:
    """Packs on the source, checks and inserts on the destination for all sizes and wires declared, as `ship_pages`."""
    return [
        task
        for route in plan_routes(_shapes(source), _shapes(destination), source.layout.num_kv_heads)
        for wire in source.config.wires
        for groups in route.group.buckets()
        for task in _shipment(source, destination, route, wire, groups)
    ]


def _shapes(outline: AbstractPrograms) -> tuple[StageShape, ...]:
    kv = outline.layout
    return tuple(StageShape(each.layers, each.submesh.tp, kv.page_size, kv.dtype) for each in outline.layer_groups)


def _shipment(
    source: AbstractPrograms, destination: AbstractPrograms, route: Route, wire: str, groups: int
) -> Iterator[Task]:
    held = source.layer_groups[route.source_stage].submesh
    wanted = destination.layer_groups[route.destination_stage].submesh
    number, heads, kind = len(route.layers), route.heads, () if wire == RAW else (wire,)
    pages = groups * route.group.source
    pools = [source._pool(held)] * number
    program = source.transfer_programs[held].pack_program(heads.slice_heads, wire, route.dtype)
    moved = number * pages * local_bytes(source._pool(held)) // (source.config.num_pages + 1)
    arguments = pools, whole(held, (pages,))
    yield Task("pack", route.source_stage, pages, program, arguments, held, number, kind, 2 * moved)
    form = source.layout, destination.layout.dtype
    slices = landed(slice_shapes(*form, number, pages, heads, source.config.digests, wire), wanted)
    stage, programs = route.destination_stage, destination.transfer_programs[wanted]
    if slices.digests or slices.errors:
        yield Task("check", stage, pages, programs.check_program, (slices,), wanted, number, kind, moved)
    pools = [destination._pool(wanted)] * number
    arguments = pools, whole(wanted, (groups * route.group.destination,)), slices.numbers
    donated = destination.pool_bytes(stage, number)
    moved = donated * groups * route.group.destination // (destination.config.num_pages + 1)
    yield Task("insert", stage, pages, programs.insert_program, arguments, wanted, number, kind, 2 * moved, donated)


def landed(slices: HeadSlices, submesh: Submesh) -> HeadSlices:
    """Shapes for one shard as the submesh holds them: cut on heads, axis 2."""
    cut = submesh.sharding(SLICE_SPEC)

    def whole(each: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape = (*each.shape[:2], each.shape[2] * submesh.tp, *each.shape[3:])
        return jax.ShapeDtypeStruct(shape, each.dtype, sharding=cut)

    return jax.tree.map(whole, slices)


def whole(submesh: Submesh, shape: tuple[int, ...], dtype: DTypeLike = jnp.int32) -> jax.ShapeDtypeStruct:
    """An array that every shard of the submesh has."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=submesh.sharding(WHOLE))


def local_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """Bytes of one device's shard, without padding."""
    shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    return jnp.dtype(leaf.dtype).itemsize * prod(shape)


def _gathers(group: LayerGroupPrograms) -> dict[str, int]:
    """The head's logits, gathered where the vocabulary is split."""
    shards = group.submesh.tp
    return {"all-gather": 1} if shards > 1 and group.config.vocab_size % shards == 0 else {}
