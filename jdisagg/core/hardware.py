"""Accelerators one may compile for without having them: data from the makers' sheets, and how a target is written.

target = chip ":" sides, as v5e:2x4, v5p:2x2x4, v6e:4x4, v7x:2x2x1 (a slice of a TPU pod, in chips; of v7x each is two
devices) or h100:8, h100:2x8 (GPUs, or hosts by GPUs).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from jdisagg.core.errors import MeshError
from jdisagg.core.model_config import ModelConfig

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Chip:
    """One device. Rates are the sheets' peaks: no program is faster, and a floor made of them is one."""

    name: str
    platform: str  # "tpu" or "gpu", as jax's devices call it
    memory_bytes: int  # what a program may take: libtpu keeps some of a TPU for itself
    memory_bytes_per_s: float
    flops_per_s: float  # dense bf16 products summed in f32
    dimensions: int  # sides of a target
    gpu: GpuSheet | None = None
    devices: int = 1  # of a chip, as jax counts them; the figures are of one
    compiled_as: str = ""  # libtpu's name for it, where it has another


@dataclass(frozen=True, slots=True)
class GpuSheet:
    """What the compiler asks of an NVIDIA GPU (the fields of XLA's GpuDeviceInfoProto that differ between them)."""

    description: str
    compute_capability: int  # major
    cores: int
    fpus_per_core: int
    shared_bytes_per_core: int
    shared_bytes_per_block: int  # the most a block may opt in to
    l2_bytes: int
    clock_ghz: float


_H100 = GpuSheet("NVIDIA H100 80GB HBM3", 9, 132, 128, 233_472, 232_448, 50 << 20, 1.98)
_H200 = GpuSheet("NVIDIA H200", 9, 132, 128, 233_472, 232_448, 50 << 20, 1.98)
_A100 = GpuSheet("NVIDIA A100-SXM4-80GB", 8, 108, 64, 167_936, 166_912, 40 << 20, 1.41)
# TPU: cloud.google.com/tpu/docs/{v5e,v5p,v6e,tpu7x}; memory as libtpu 0.0.42 says it in "exceeds available HBM".
# GPU: NVIDIA's data sheets of the SXM boards, without sparsity; memory as the driver counts it.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", "tpu", int(15.75 * GIB), 819e9, 197e12, 2),
        Chip("v5p", "tpu", int(95.74 * GIB), 2_765e9, 459e12, 3),
        Chip("v6e", "tpu", int(31.25 * GIB), 1_640e9, 918e12, 2),
        Chip("v7x", "tpu", int(94.75 * GIB), 3_690e9, 1_153.5e12, 3, devices=2, compiled_as="tpu7x"),
        Chip("a100", "gpu", 85_100_068_864, 2_039e9, 312e12, 2, _A100),
        Chip("h100", "gpu", 84_942_979_072, 3_352e9, 989.4e12, 2, _H100),
        Chip("h200", "gpu", 151_397_597_184, 4_800e9, 989.4e12, 2, _H200),
    )
}


# How jax calls a TPU, where that is not its name here.
_KINDS = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e", "TPU7x": "v7x"}


def chip_called(device_kind: str) -> Chip | None:
    """The chip that jax calls so; None where there is no sheet. Of a GPU, boards of other memory or form are others."""
    name = _KINDS.get(device_kind, device_kind.removeprefix("TPU "))
    found = (each for each in CHIPS.values() if each.gpu is not None and each.gpu.description == device_kind)
    return CHIPS.get(name) or next(found, None)


@dataclass(frozen=True, slots=True)
class Target:
    """`sides` multiply to the number of devices; those of a GPU are (hosts, GPUs of one)."""

    chip: Chip
    sides: tuple[int, ...]

    @staticmethod
    def parse(text: str) -> Target:
        """Raises MeshError saying what is wrong and what could be written."""
        match = re.fullmatch(r"(?P<chip>\w+):(?P<sides>[1-9]\d*(x[1-9]\d*)*)", text.strip().lower())
        if match is None:
            raise MeshError(f"cannot read target {text!r}; targets are written as v5e:2x4, v5p:2x2x4 or h100:8")
        chip = CHIPS.get(match["chip"])
        if chip is None:
            raise MeshError(f"unknown chip {match['chip']!r} in target {text!r}; chips are {', '.join(CHIPS)}")
        sides = tuple(int(side) for side in match["sides"].split("x"))
        if chip.gpu and len(sides) == 1:
            sides = (1, *sides)
        if len(sides) != chip.dimensions:
            raise MeshError(f"target {text!r} has {len(sides)} sides, {chip.name} has {chip.dimensions}")
        return Target(chip, sides)

    def __str__(self) -> str:
        shown = self.sides[1:] if self.chip.gpu and self.sides[0] == 1 else self.sides
        return f"{self.chip.name}:" + "x".join(map(str, shown))

    @property
    def num_devices(self) -> int:
        return prod(self.sides) * self.chip.devices

    def host_of(self, device: int) -> int:
        """As links see it: GPUs of a host are joined by NVLink, chips of a slice by ICI, whatever hosts have them."""
        return device // self.sides[1] if self.chip.gpu else 0


# The least time a step can take on a chip: bytes over the memory's speed, or FLOPs over the peak, whichever is
# more.
#
# Counted for one device of a stage. Every weight is read once a step, of experts those that its tokens are
# expected to be sent to; every held token's K and V once; activations and collectives count nothing, so no
# program can be faster than its floor.


@dataclass(frozen=True, slots=True)
class Work:
    """What one device does in one step."""

    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    flops: float = 0.0

    def floor_s(self, chip: Chip) -> float:
        return max(self.memory_s(chip), self.flops / chip.flops_per_s)

    def __add__(self, other: Work) -> Work:
        return Work(self.weight_bytes + other.weight_bytes, self.kv_bytes + other.kv_bytes, self.flops + other.flops)

    def times(self, number: float) -> Work:
        return Work(self.weight_bytes * number, self.kv_bytes * number, self.flops * number)

    def memory_s(self, chip: Chip) -> float:
        return (self.weight_bytes + self.kv_bytes) / chip.memory_bytes_per_s

    def bound(self, chip: Chip) -> str:
        return "memory" if self.memory_s(chip) >= self.flops / chip.flops_per_s else "compute"


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `tp` shards of a run of layers, and the bytes of a weight and of a K or V number."""

    model: ModelConfig
    layers: range
    tp: int
    weight_bytes: float  # of the mean number
    kv_bytes: float

    @property
    def held_bytes(self) -> float:
        """Bytes of the weights that this shard keeps: the embedding is whole on every shard of the first stage."""
        params = self._layers_params
        if self.layers.start == 0:
            params += self.model.embedding_params
        if self._has_head and not self._head_is_embedding:
            params += self.model.head_params(self.tp)
        return params * self.weight_bytes

    @property
    def _head_is_embedding(self) -> bool:
        whole = self.model.head_params(self.tp) == self.model.embedding_params
        return self.model.tie_embeddings and whole and self.layers.start == 0

    @property
    def _layers_params(self) -> int:
        return sum(self.model.layer_params(self.tp, layer) * count for layer, count in self._kinds)

    @property
    def _kinds(self) -> tuple[tuple[int, int], ...]:
        return self.model.layer_kinds(self.layers)

    @property
    def _has_head(self) -> bool:
        return self.layers.stop == self.model.num_layers

    @property
    def kv_bytes_per_token(self) -> float:
        """Of one layer."""
        return self.model.layer_kv_size(self.tp) * self.kv_bytes

    def seen(self, tokens: int) -> int:
        """Tokens that a query at the end of `tokens` sees, summed over the layers."""
        windows = (self.model.window(layer) for layer in self.layers)
        return sum(tokens if window is None else min(tokens, window) for window in windows)

    def decode(self, slots: int, context_tokens: int) -> Work:
        """One token of each of `slots` sequences that hold `context_tokens`; the last stage makes logits as well."""
        return self.decode_layers(slots, context_tokens) + (self.head(slots) if self._has_head else Work())

    def decode_layers(self, slots: int, context_tokens: int) -> Work:
        """As `decode`, without logits."""
        seen = slots * self.seen(context_tokens)
        return self._layers_work(slots, seen, seen, decoding=True)

    def prefill(self, tokens: int) -> Work:
        """A chunk that is one whole prompt of `tokens`; the head is a program of its own."""
        seen = tokens * self.seen(tokens // 2)  # the mean query sees half the prompt
        return self._layers_work(tokens, seen, len(self.layers) * tokens)

    def head(self, rows: int) -> Work:
        """Logits of `rows` rows."""
        params = self.model.head_params(self.tp)
        return Work(params * self.weight_bytes, 0.0, 2 * params * rows)

    def _layers_work(self, tokens: int, pairs: int, read: int, *, decoding: bool = False) -> Work:
        """pairs: of a query and a key; read: tokens whose K and V are read; both summed over the layers."""
        model, tp = self.model, self.tp
        linear = sum(model.linear_flops(tokens, tp, layer) * count for layer, count in self._kinds)
        weights = sum(model.read_params(tokens, tp, layer) * count for layer, count in self._kinds)
        flops = linear + model.attention_flops(pairs, tp, decoding=decoding)
        return Work(weights * self.weight_bytes, read * self.kv_bytes_per_token, flops)


def ring_tick(places: Sequence[Shard], stages: int, slots: int, context_tokens: int) -> Work:
    """One device of a ring at one tick: the layer at each of its places for a microbatch, padding as any other, and its
    share of the head, which is cut over all shards of all `stages`."""
    layers = sum((each.decode_layers(slots, context_tokens) for each in places), Work())
    return layers + places[0].head(slots).times(1 / stages)


# What crosses between the devices of one program: its collectives, the bytes of each, and over which links.
#
# Bytes are those that the busiest device must send, by the algorithm that sends the fewest over the slow links:
# within each host first, then between hosts, each device its own share.

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Collective:
    """One instruction. `groups`: places among the program's devices, of a permute (from, to); (): all of them."""

    kind: str
    size_bytes: int  # of the whole array that a device sends or ends up with, whichever is more
    groups: Groups
    depth: int  # loops that it is in, one within the other

    def sent(self, hosts: Sequence[int]) -> Sent:
        """By the busiest device, once. hosts: of each of the program's devices."""
        if self.kind == "collective-permute":
            across = [hosts[one] != hosts[other] for one, other in self.groups]
            return Sent(self.size_bytes * (not all(across)), self.size_bytes * any(across))
        found = [self._group_sent([hosts[place] for place in group]) for group in self.groups or (range(len(hosts)),)]
        return Sent(max(each.inside for each in found), max(each.between for each in found))

    def _group_sent(self, hosts: Sequence[int]) -> Sent:
        number, size = len(set(hosts)), self.size_bytes
        most = max(Counter(hosts).values())
        inside, between = size * (most - 1) / most, size / most * (number - 1) / number
        if self.kind == "all-to-all":
            return Sent(size * (most - 1) / len(hosts), size * (len(hosts) - most) / len(hosts))
        if self.kind == "collective-broadcast":
            return Sent(size * (most > 1), size * (number > 1))
        return Sent(2 * inside, 2 * between) if self.kind == "all-reduce" else Sent(inside, between)


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes of one device: within its host (NVLink), or slice (ICI), and to other hosts."""

    inside: float = 0.0
    between: float = 0.0

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.inside + other.inside, self.between + other.between)

    def times(self, number: int) -> Sent:
        return Sent(self.inside * number, self.between * number)


def sent_by(collectives: Sequence[Collective], hosts: Sequence[int], loops: Sequence[int] = ()) -> Sent:
    """All of a program. loops: how often each goes round, from the outermost in."""
    found = [each.sent(hosts).times(prod(loops[: each.depth])) for each in collectives]
    return sum(found, Sent())


def counted(collectives: Sequence[Collective]) -> dict[str, int]:
    """By kind."""
    return dict(Counter(each.kind for each in collectives))


# How the chips of a TPU slice are joined: a mesh whose axes close to rings where they are long enough.
#
# A collective over chips that fill a box uses the links of all the box's axes at once, both ways round those that
# close (colours of XLA's own rings; Austin et al., "How to Scale Your Model", parts 2 and 3). Elsewhere one link
# is counted.

# Closed by optical switches, cube by cube (v4, v5p, v7x); a plane's only where it spans a pod (v5e, v6e).
CUBE, POD = 4, 16


@dataclass(frozen=True, slots=True)
class Joined:
    """What a group of devices has between them. links: of a device, that one collective sends over at once. hops: from
    one device to the farthest."""

    links: int = 1
    hops: int = 0


def closes(target: Target, axis: int) -> bool:
    """Whether the last chip of the slice's axis is the first one's neighbour."""
    side = target.sides[axis]
    return side % CUBE == 0 if len(target.sides) == 3 else side == POD


def joined(target: Target, places: Sequence[tuple[int, ...]]) -> Joined:
    """Chips at these places of a slice. GPUs' links are one switch's, which all of them reach."""
    if target.chip.gpu is not None or len(set(places)) < 2:
        return Joined()
    axes = [sorted({place[axis] for place in places}) for axis in range(len(target.sides))]
    if prod(map(len, axes)) != len(set(places)):
        return Joined(1, len(set(places)) - 1)
    rings = [closes(target, axis) and len(taken) == target.sides[axis] for axis, taken in enumerate(axes)]
    links = sum((2 if ring else 1) for taken, ring in zip(axes, rings, strict=True) if len(taken) > 1)
    hops = sum(len(taken) // 2 if ring else len(taken) - 1 for taken, ring in zip(axes, rings, strict=True))
    return Joined(links, hops)
