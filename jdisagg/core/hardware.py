"""Accelerators that programs may be compiled for without having them: data from the makers' sheets, and the syntax of a
target.

target = chip ":" sides, as v5e:2x4, v5p:2x2x4, v6e:4x4, v7x:2x2x1 (a slice of a TPU pod, in chips; each chip of v7x is
two devices) or h100:8, h100:2x8 (GPUs, or hosts by GPUs). The module also computes the least time of a step on a chip
and the bytes that collectives send over links.
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
    """The data of one device. Rates are the sheets' peaks, which no program exceeds, so times computed from them are
    lower bounds."""

    name: str
    platform: str  # "tpu" or "gpu", as jax's devices call it
    memory_bytes: int  # memory for programs; libtpu reserves part of a TPU's
    memory_bytes_per_s: float
    flops_per_s: float  # dense bf16 products summed in f32
    dimensions: int  # number of sides of a target
    gpu: GpuSheet | None = None
    devices: int = 1  # devices per chip, as jax counts them; all other fields are of one device
    compiled_as: str = ""  # libtpu's name of the chip, if it differs


@dataclass(frozen=True, slots=True)
class GpuSheet:
    """The compiler's parameters of an NVIDIA GPU: the fields of XLA's GpuDeviceInfoProto that differ between GPUs."""

    description: str
    compute_capability: int  # major
    cores: int
    fpus_per_core: int
    shared_bytes_per_core: int
    shared_bytes_per_block: int  # the opt-in maximum
    l2_bytes: int
    clock_ghz: float


_H100 = GpuSheet("NVIDIA H100 80GB HBM3", 9, 132, 128, 233_472, 232_448, 50 << 20, 1.98)
_H200 = GpuSheet("NVIDIA H200", 9, 132, 128, 233_472, 232_448, 50 << 20, 1.98)
_A100 = GpuSheet("NVIDIA A100-SXM4-80GB", 8, 108, 64, 167_936, 166_912, 40 << 20, 1.41)
# TPU: cloud.google.com/tpu/docs/{v5e,v5p,v6e,tpu7x}; memory as in libtpu 0.0.42's "exceeds available HBM".
# GPU: NVIDIA's data sheets of the SXM boards, without sparsity; memory as reported by the driver.
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


# jax's names of TPUs, if they differ from the names here.
_KINDS = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e", "TPU7x": "v7x"}


def chip_called(device_kind: str) -> Chip | None:
    """Returns the chip with this jax device kind; None without a data sheet. GPU boards of other memory or form are
    other chips."""
    name = _KINDS.get(device_kind, device_kind.removeprefix("TPU "))
    found = (each for each in CHIPS.values() if each.gpu is not None and each.gpu.description == device_kind)
    return CHIPS.get(name) or next(found, None)


@dataclass(frozen=True, slots=True)
class Target:
    """A chip and the sides of a slice. `sides` multiply to the number of devices; those of a GPU are (hosts, GPUs per
    host)."""

    chip: Chip
    sides: tuple[int, ...]

    @staticmethod
    def parse(text: str) -> Target:
        """Parses a target. Raises MeshError with the fault and the valid forms."""
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
        """Returns the host of a device in terms of links: GPUs of a host share NVLink; all chips of a TPU slice share
        ICI."""
        return device // self.sides[1] if self.chip.gpu else 0


# The roofline of a step: the bytes over the memory's rate, or the FLOPs over the peak, whichever is more.
#
# It is computed for one device of a stage. Every weight is read once per step, for experts those that its tokens are
# expected to use. Every held token's K and V is read once. Activations and collectives count as zero, so no program can
# be faster.


@dataclass(frozen=True, slots=True)
class Work:
    """The bytes and FLOPs of one device in one step."""

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
    """One of `tp` shards of consecutive layers, and the bytes of a weight and of a K or V number."""

    model: ModelConfig
    layers: range
    tp: int
    weight_bytes: float  # mean bytes per weight
    kv_bytes: float

    @property
    def held_bytes(self) -> float:
        """Returns the bytes of the weights on this shard: the embedding is whole on every shard of the first stage."""
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
        """Returns the KV bytes of one token in one layer."""
        return self.model.layer_kv_size(self.tp) * self.kv_bytes

    def seen(self, tokens: int) -> int:
        """Returns the tokens that a query at the end of `tokens` sees, summed over the layers."""
        windows = (self.model.window(layer) for layer in self.layers)
        return sum(tokens if window is None else min(tokens, window) for window in windows)

    def decode(self, slots: int, context_tokens: int) -> Work:
        """Returns the work of one token of each of `slots` sequences of `context_tokens`; the last stage computes
        logits too."""
        return self.decode_layers(slots, context_tokens) + (self.head(slots) if self._has_head else Work())

    def decode_layers(self, slots: int, context_tokens: int) -> Work:
        """Returns the work of `decode` without logits."""
        seen = slots * self.seen(context_tokens)
        return self._layers_work(slots, seen, seen, decoding=True)

    def prefill(self, tokens: int) -> Work:
        """Returns the work of a chunk that is one whole prompt of `tokens`; the head is a separate program."""
        seen = tokens * self.seen(tokens // 2)  # the mean query sees half the prompt
        return self._layers_work(tokens, seen, len(self.layers) * tokens)

    def head(self, rows: int) -> Work:
        """Returns the work of the logits of `rows` rows."""
        params = self.model.head_params(self.tp)
        return Work(params * self.weight_bytes, 0.0, 2 * params * rows)

    def _layers_work(self, tokens: int, pairs: int, read: int, *, decoding: bool = False) -> Work:
        """Returns the work of the layers; pairs: of a query and a key; read: tokens whose K and V are read; both summed
        over the layers."""
        model, tp = self.model, self.tp
        linear = sum(model.linear_flops(tokens, tp, layer) * count for layer, count in self._kinds)
        weights = sum(model.read_params(tokens, tp, layer) * count for layer, count in self._kinds)
        flops = linear + model.attention_flops(pairs, tp, decoding=decoding)
        return Work(weights * self.weight_bytes, read * self.kv_bytes_per_token, flops)


def ring_tick(places: Sequence[Shard], stages: int, slots: int, context_tokens: int) -> Work:
    """Returns the work of one device of a ring at one tick: the layer at each of its positions for a microbatch,
    padding like any other, and its share of the head, which is split over all shards of all `stages`."""
    layers = sum((each.decode_layers(slots, context_tokens) for each in places), Work())
    return layers + places[0].head(slots).times(1 / stages)


# Collectives of a program: the bytes of each, and the links they use.
#
# Bytes are those that the busiest device must send, by the algorithm that sends the fewest over the slow links: within
# each host first, then between hosts, each device its own share.

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective. `groups`: device numbers of the program; for a permute (from, to); (): all devices in one
    group."""

    kind: str
    size_bytes: int  # the larger of the whole arrays that a device sends and receives
    groups: Groups
    depth: int  # number of nested loops around it

    def sent(self, hosts: Sequence[int]) -> Sent:
        """Returns what the busiest device sends in one run; hosts: the host of each of the program's devices."""
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
    """The bytes that one device sends: within its host (NVLink) or slice (ICI), and to other hosts."""

    inside: float = 0.0
    between: float = 0.0

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.inside + other.inside, self.between + other.between)

    def times(self, number: int) -> Sent:
        return Sent(self.inside * number, self.between * number)


def sent_by(collectives: Sequence[Collective], hosts: Sequence[int], loops: Sequence[int] = ()) -> Sent:
    """Returns what a program sends in all; loops: iterations of its nested loops, outermost first."""
    found = [each.sent(hosts).times(prod(loops[: each.depth])) for each in collectives]
    return sum(found, Sent())


def counted(collectives: Sequence[Collective]) -> dict[str, int]:
    """Returns the number of collectives per kind."""
    return dict(Counter(each.kind for each in collectives))


# Links of a TPU slice: a mesh whose axes close to rings if they are long enough.
#
# A collective over chips that fill a box uses the links of all the box's axes at once, in both directions of those that
# close (colours of XLA's own rings; Austin et al., "How to Scale Your Model", parts 2 and 3). For other groups one link
# is counted.

# Axes are closed by optical switches, cube by cube (v4, v5p, v7x); on planes only if they span a pod (v5e, v6e).
CUBE, POD = 4, 16


@dataclass(frozen=True, slots=True)
class Joined:
    """The links of a group of devices. links: links of a device that one collective uses at once; hops: from one device
    to the farthest."""

    links: int = 1
    hops: int = 0


def closes(target: Target, axis: int) -> bool:
    """Returns True if the last chip of the slice's axis is a neighbour of the first one."""
    side = target.sides[axis]
    return side % CUBE == 0 if len(target.sides) == 3 else side == POD


def joined(target: Target, places: Sequence[tuple[int, ...]]) -> Joined:
    """Returns the links of the chips at these positions of a slice. GPUs are joined by one switch."""
    if target.chip.gpu is not None or len(set(places)) < 2:
        return Joined()
    axes = [sorted({place[axis] for place in places}) for axis in range(len(target.sides))]
    if prod(map(len, axes)) != len(set(places)):
        return Joined(1, len(set(places)) - 1)
    rings = [closes(target, axis) and len(taken) == target.sides[axis] for axis, taken in enumerate(axes)]
    links = sum((2 if ring else 1) for taken, ring in zip(axes, rings, strict=True) if len(taken) > 1)
    hops = sum(len(taken) // 2 if ring else len(taken) - 1 for taken, ring in zip(axes, rings, strict=True))
    return Joined(links, hops)
