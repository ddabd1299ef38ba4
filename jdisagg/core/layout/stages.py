"""Splits a model's layers into stages by cost, so that embedding and logits slow no decode stage down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from jdisagg.core.errors import MeshError
from jdisagg.core.mesh_spec import MeshSpec, Role, WorkerMesh
from jdisagg.core.model_config import AttentionOptions, ModelConfig

Kind = tuple[bool, AttentionOptions]  # (True if a layer has experts, its attention)


def head_cost(config: ModelConfig) -> float:
    """Returns the head's weights in units of one layer's: the extra load of the last stage."""
    return config.head_params() / config.layer_params()


def split_layers(config: ModelConfig, num_stages: int) -> tuple[range, ...]:
    """Returns consecutive, non-empty runs of layers that minimise the cost of the most expensive stage. Decode reads
    every weight once per step, so weights are the cost; the embedding is a lookup and costs nothing. Raises MeshError
    if there are more stages than layers."""
    if num_stages > config.num_layers:
        raise MeshError(f"{num_stages} stages (pp) for {config.num_layers} layers: at most one stage a layer")
    extra = head_cost(config)
    last = min(
        range(1, config.num_layers - num_stages + 2),
        key=lambda layers: (_slowest(config.num_layers - layers, num_stages - 1, layers + extra), -layers),
    )
    if num_stages == 1:
        return (range(config.num_layers),)
    even, odd = divmod(config.num_layers - last, num_stages - 1)
    sizes = [even + (stage < odd) for stage in range(num_stages - 1)] + [last]
    ends = [sum(sizes[: stage + 1]) for stage in range(num_stages)]
    return tuple(range(end - size, end) for size, end in zip(sizes, ends, strict=True))


def split_prefill(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """Returns runs of layers of equal length, the first ones longer by one if they do not divide. The head computes
    only one row of a chunk, so the last stage has it in addition. Raises MeshError if there are more stages than
    layers."""
    if num_stages > num_layers:
        raise MeshError(f"{num_stages} prefill stages (pp) for {num_layers} layers: at most one stage a layer")
    even, odd = divmod(num_layers, num_stages)
    ends = [stage * even + min(stage, odd) for stage in range(num_stages + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(ends))


def _slowest(layers: int, stages: int, last_cost: float) -> float:
    return max(last_cost, -(-layers // stages) if stages else 0)


@dataclass(frozen=True, slots=True)
class RingCut:
    """Layers over the stages of a ring, which all run one program. At each position the layers of all stages are of one
    kind, or padding, which takes memory on the device and leaves the activations unchanged."""

    runs: tuple[range, ...]  # layers of each stage
    places: tuple[tuple[int | None, ...], ...]  # [stage][position]: the layer of the model; None: padding

    @property
    def num_stages(self) -> int:
        return len(self.runs)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Returns for each position a layer that one of the stages has there."""
        columns = zip(*self.places, strict=True)
        return tuple(next(layer for layer in column if layer is not None) for column in columns)

    def place_of(self, stage: int, layer: int) -> int:
        return self.places[stage].index(layer)


def ring_cut(config: ModelConfig, num_stages: int) -> RingCut:
    """Returns the most even split with the fewest positions. Raises MeshError if there are more stages than layers. The
    head is spread over the whole ring and slows no stage down."""
    if num_stages > config.num_layers:
        raise MeshError(f"a ring of {num_stages} stages for {config.num_layers} layers: at most one stage a layer")
    kinds = [(config.is_sparse(layer), config.attention(layer)) for layer in range(config.num_layers)]
    found = [_placed(kinds, runs) for runs in _cuts(config.num_layers, num_stages)]
    return min(found, key=lambda cut: len(cut.places[0]))


def _cuts(num_layers: int, num_stages: int) -> list[tuple[range, ...]]:
    """Returns the even split, and those of longer stages before a shorter last one, which may match the kinds
    better."""
    even, odd = divmod(num_layers, num_stages)
    sizes = [[even + (stage < odd) for stage in range(num_stages)]]
    for size in range(even + 1, (num_layers - 1) // max(1, num_stages - 1) + 1):
        sizes.append([size] * (num_stages - 1) + [num_layers - size * (num_stages - 1)])
    ends = [[sum(each[: stage + 1]) for stage in range(num_stages)] for each in sizes]
    return [tuple(range(start, stop) for start, stop in pairwise([0, *each])) for each in ends]


def _placed(kinds: Sequence[Kind], runs: tuple[range, ...]) -> RingCut:
    """Assigns every stage's layers to positions of their kind, in order."""
    columns: list[Kind] = []
    for run in runs:
        columns = _supersequence(columns, [kinds[layer] for layer in run])
    return RingCut(runs, tuple(_stage_places(kinds, run, columns) for run in runs))


def _stage_places(kinds: Sequence[Kind], run: range, columns: Sequence[Kind]) -> tuple[int | None, ...]:
    left, found = list(run), list[int | None]()
    for kind in columns:
        found.append(left.pop(0) if left and kinds[left[0]] == kind else None)
    assert not left, (run, columns)
    return tuple(found)


def _supersequence(one: Sequence[Kind], other: Sequence[Kind]) -> list[Kind]:
    """Returns the shortest list that contains both lists in order."""
    best = [[list[Kind](other[j:]) for j in range(len(other) + 1)]]
    for i in reversed(range(len(one))):
        row = [list[Kind](one[i:])]
        for j in reversed(range(len(other))):
            if one[i] == other[j]:
                row.insert(0, [one[i], *best[0][j + 1]])
            else:
                row.insert(0, min([one[i], *best[0][j]], [other[j], *row[0]], key=len))
        best.insert(0, row)
    return best[0][0]


def cut_layers(model: ModelConfig, mesh: MeshSpec) -> tuple[range, ...]:
    """Returns the layers of each decode stage. Raises MeshError."""
    return ring_cut(model, mesh.decode_pp).runs if mesh.is_ring else split_layers(model, mesh.decode_pp)


def own_layers(model: ModelConfig, decode_stages: tuple[range, ...], place: WorkerMesh) -> tuple[range, ...]:
    """Returns the stages or layer groups of a worker combined with decode workers of such stages. Raises MeshError."""
    staged = place.role is Role.PREFILL and place.pp > 1
    return split_prefill(model.num_layers, place.pp) if staged else decode_stages
