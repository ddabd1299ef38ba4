"""How long a worker's plans take, and how many bytes a part of KV is: the answers that a simulation runs on.

Two kinds: lines that others fitted to measurements of one engine (`PublishedFit`), and a roofline of the hardware's
constants with named efficiencies (`Roofline`). A plan's seconds are those of all its pipeline stages together. A decode
step depends on the batch *and* on the tokens that it reads: with either one alone, decoding gets no slower under load.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from jdisagg.core.errors import ConfigError
from jdisagg.core.hardware import Collective, Sent
from jdisagg.core.layout.stages import ring_cut
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.steps import DecodeRows, KVTransfer, PrefillChunks
from jdisagg.sim.arithmetic import model, number_bytes
from jdisagg.sim.hardware import Hardware

DISTSERVE = Path(__file__).parent / "data" / "distserve_a100_80g.json"
ENGINES = ("distserve", "vllm")  # whose measurements the fits are of
MEMORY_SHARE = 0.9  # of a device that weights and KV may take; the rest is activations and the runtime's own


Contexts = npt.NDArray[np.int64]
Times = npt.NDArray[np.float64]


class CostModel(Protocol):
    """One worker's costs."""

    def prefill_s(self, plan: PrefillChunks) -> float:
        """Seconds of the plan on a device that does nothing else."""
        ...

    def decode_s(self, plan: DecodeRows, context_tokens: int) -> float:
        """Seconds of one step. context_tokens: KV tokens that its active slots read, all together."""
        ...

    def transfer_bytes(self, transfer: KVTransfer) -> float:
        """What the part puts on the wire."""
        ...


@runtime_checkable
class ManySteps(CostModel, Protocol):
    """One whose formula takes many steps at once, as arrays: a simulator then asks once for a sequence's whole life."""

    def steps_s(self, plan: DecodeRows, context_tokens: Contexts) -> Times:
        """`decode_s` of each of context_tokens, i64[N] -> f64[N], to the last bit."""
        ...


@runtime_checkable
class MixedCostModel(CostModel, Protocol):
    """Knows what a step of chunks and decode rows together takes."""

    def mixed_s(self, prefill: PrefillChunks, decode: DecodeRows, context_tokens: int) -> float:
        """Seconds of the step: weights are read once for the rows of both."""
        ...


def drawn(plan: PrefillChunks) -> int:
    """Rows of the plan that a token is drawn for."""
    return sum(chunk.last for chunk in plan.chunks)


@dataclass(frozen=True, slots=True)
class Model:
    """What a part of KV is made of."""

    config: ModelConfig
    dtype: str = "bfloat16"

    def kv_bytes(self, tokens: float, tp: int = 1) -> float:
        """Of all layers, on one of `tp` shards."""
        return self.config.kv_bytes(tokens, number_bytes(self.dtype), tp)

    def part_bytes(self, transfer: KVTransfer) -> float:
        """Bytes of a part's tokens, of its own layers alone."""
        layers = self.config.num_layers
        first, stop = transfer.layers or (0, layers)
        return self.kv_bytes(transfer.num_tokens) * (stop - first) / layers

    def row_bytes(self, rows: int) -> float:
        """Of the activations that a layer hands on."""
        return rows * self.config.hidden_size * number_bytes(self.dtype)


def all_reduce_s(size_bytes: float, tp: int, bytes_per_s: float, fixed_s: float) -> float:
    """A ring over `tp` devices: 2 (tp - 1) / tp of the bytes go over each link; nothing where there is one."""
    return fixed_s + size_bytes * 2 * (tp - 1) / tp / bytes_per_s if tp > 1 else 0.0


def _over(formula: Callable[[DecodeRows, Any], Any], plan: DecodeRows, context_tokens: Contexts) -> Times:
    """A formula that only adds and multiplies is the same over an array."""
    return formula(plan, context_tokens)


# ---------------------------------------------------------------------- fits


@dataclass(frozen=True, slots=True)
class Line:
    """a + b·x + c·y, in seconds."""

    a: float
    b: float
    c: float

    def at(self, x: float, y: float) -> float:
        return self.a + self.b * x + self.c * y


@dataclass(frozen=True, slots=True)
class PublishedFit:
    """prefill = a + b·Σlen + c·Σlen²; decode = a + b·context + c·batch, of two lines by the batch (DistServe, OSDI'24).

    A chunk that begins at token s and ends at e counts e² - s² of the squares: what its queries see.
    """

    model: Model
    prefill: Line
    small: Line  # decode, batch up to `threshold`
    large: Line
    threshold: int
    host_s: float = 0.0  # of the host, a plan

    def prefill_s(self, plan: PrefillChunks) -> float:
        squares = sum((chunk.start + len(chunk.tokens)) ** 2 - chunk.start**2 for chunk in plan.chunks)
        return self.host_s + self.prefill.at(plan.num_tokens, squares)

    def decode_s(self, plan: DecodeRows, context_tokens: int) -> float:
        batch = len(plan.active)
        line = self.small if batch < self.threshold else self.large
        return self.host_s + line.at(context_tokens, batch)

    def steps_s(self, plan: DecodeRows, context_tokens: Contexts) -> Times:
        return _over(self.decode_s, plan, context_tokens)

    def transfer_bytes(self, transfer: KVTransfer) -> float:
        return self.model.part_bytes(transfer)


@cache
def _distserve() -> dict[str, Any]:
    return json.loads(DISTSERVE.read_text(encoding="utf-8"))


def _among(rows: dict[str, Any], key: str, what: str) -> Any:
    if key not in rows:
        raise ConfigError(f"no published fit for {what} {key!r}; there are {', '.join(rows)}")
    return rows[key]


def distserve_fit(name: str, tp: int, engine: str = "distserve", host_s: float = 0.0) -> PublishedFit:
    """Fitted on A100-80G in FP16, of opt-13b (TP 1, 2, 4) and opt-66b (TP 2, 3, 4, 8). Raises ConfigError elsewhere."""
    sizes = _among(_among(_distserve(), engine, "engine"), name, "model")
    row = _among(sizes, str(tp), f"{name} at tp")
    lines = [Line(*(each / 1e3 for each in row[kind])) for kind in ("prefill", "decode_small", "decode_large")]
    return PublishedFit(Model(model(name), "float16"), *lines, threshold=row["threshold"], host_s=host_s)


def distserve_kv_tokens(name: str, tp: int, pp: int) -> int:
    """KV tokens that the engine had room for on `tp` x `pp` A100-80G. Raises ConfigError for what was not published."""
    return _among(_among(_distserve()["kv_tokens"], name, "model"), f"tp{tp}pp{pp}", f"{name} on")


# ---------------------------------------------------------------------- roofline


@dataclass(frozen=True, slots=True)
class Roofline:
    """`tp` devices, each with 1/tp of the weights and heads; efficiencies are the hardware's, by name.

    Of experts a step multiplies by those that each token is sent to, and reads those that any is expected to be.

    Linear work takes its FLOPs or its weights' bytes, whichever is longer, the layers' matrices and the head's apart;
    where the chip multiplies the weights' dtype faster, activations are taken to be of it, too.
    Attention follows: FLOPs of the pairs below the diagonal in prefill, bytes of the KV read in decode; of latents,
    which many heads share, the FLOPs of reading them where those are longer. Two all-reduces a layer where tp > 1
    (ring: 2 (tp - 1) / tp of the bytes). Looking tokens up in the embedding is left out.
    """

    model: Model
    chip: Hardware
    tp: int = 1
    weight_dtype: str = "bfloat16"
    host_s: float = 1e-3  # of the host, a plan

    def prefill_s(self, plan: PrefillChunks) -> float:
        return self.host_s + self._linear_s(plan.num_tokens) + self._pairs_s(plan) + self._head_s(drawn(plan))

    def decode_s(self, plan: DecodeRows, context_tokens: int) -> float:
        """Of several turns, which each read every weight and the KV there is by then, the host is paid once."""
        batch, turns = len(plan.active), plan.num_turns
        read = context_tokens - (plan.most_tokens - batch) / 2 if turns > 1 else context_tokens  # at the mean turn
        return self.host_s + turns * (self._linear_s(batch) + self._read_s(read) + self._head_s(batch))

    def mixed_s(self, prefill: PrefillChunks, decode: DecodeRows, context_tokens: int) -> float:
        batch = len(decode.active)
        attention_s = self._pairs_s(prefill) + self._read_s(context_tokens)
        linear_s = self._linear_s(prefill.num_tokens + batch) + self._head_s(drawn(prefill) + batch)
        return self.host_s + linear_s + attention_s

    def steps_s(self, plan: DecodeRows, context_tokens: Contexts) -> Times:
        return _over(self.decode_s, plan, context_tokens)

    def transfer_bytes(self, transfer: KVTransfer) -> float:
        return self.model.part_bytes(transfer)

    def _pairs_s(self, plan: PrefillChunks) -> float:
        config = self.model.config
        ends = [(chunk.start, chunk.start + len(chunk.tokens)) for chunk in plan.chunks]
        flops = config.num_layers * config.attention_flops(sum(end**2 - start**2 for start, end in ends) / 2, self.tp)
        return flops / (self.chip.flops * self.chip.prefill_attention)

    def _read_s(self, context_tokens: float) -> float:
        """Linear in context_tokens, which may be an array: a token's bytes and FLOPs say which of the two is longer."""
        longer = self._scores_s if self._scores_s(1) > self._kv_s(1) else self._kv_s
        return longer(context_tokens)

    def _kv_s(self, context_tokens: float) -> float:
        kv_bytes = self.model.kv_bytes(context_tokens, self.tp)
        return kv_bytes / (self.chip.hbm_bytes_per_s * self.chip.decode_attention)

    def _scores_s(self, context_tokens: float) -> float:
        config = self.model.config
        flops = config.num_layers * config.attention_flops(context_tokens, self.tp, decoding=True)
        return flops / (self.chip.flops * self.chip.prefill_attention)

    def _linear_s(self, rows: int) -> float:
        config = self.model.config
        active, read = config.active_params(self.tp), config.read_params(rows, self.tp)
        return self._matrices_s(config.num_layers * active, config.num_layers * read, rows) + self._collectives_s(rows)

    def _head_s(self, rows: int) -> float:
        params = self.model.config.head_params(self.tp)
        return self._matrices_s(params, params, rows) if rows else 0.0

    def _matrices_s(self, active: float, read: float, rows: int) -> float:
        """Weights of one shard. active: that each row multiplies by; read: that all rows together do."""
        compute_s = 2 * active * rows / (self.chip.flops_of(self.weight_dtype) * self.chip.gemm)
        read_bytes = read * number_bytes(self.weight_dtype)
        return max(compute_s, read_bytes / (self.chip.hbm_bytes_per_s * self.chip.skinny))

    @property
    def weight_bytes(self) -> float:
        """Of all shards together."""
        return self.model.config.num_params(self.tp) * number_bytes(self.weight_dtype)

    def _collectives_s(self, rows: int) -> float:
        bytes_per_s = self.chip.link_bytes_per_s * self.chip.link
        one_s = all_reduce_s(self.model.row_bytes(rows), self.tp, bytes_per_s, self.chip.collective_s)
        return 2 * self.model.config.num_layers * one_s

    def kv_tokens(self, pp: int = 1) -> int:
        """KV tokens that fit beside the weights on tp x pp devices. Raises ConfigError where the weights do not fit."""
        room = MEMORY_SHARE * self.chip.hbm_bytes * self.tp * pp - self.weight_bytes
        if room <= 0:
            devices = f"{self.tp * pp} x {self.chip.name}"
            raise ConfigError(f"{self.model.config.family}: {self.weight_bytes:.3g} bytes of weights, over {devices}")
        return int(room // (self.tp * self.model.kv_bytes(1, self.tp)))


# What a ring's dispatch takes, by the arithmetic of its program: ticks, and at each what crosses between devices.

LOGIT_BYTES = 4  # they are gathered in float32


@dataclass(frozen=True, slots=True)
class RingRoofline:
    """A ring of `pp` stages whose devices each do what the roofline of one of `stages`' says.

    A dispatch of n turns is n * pp + pp - 1 ticks. At each every stage steps one of pp microbatches through the layers
    at its places, padding among them, and the head is cut over all shards. Four collectives a tick: the sum of the
    embedding's rows and that of the activations that leave, the gather of the logits, the hop to the next stage. What
    goes between hosts goes over the NICs. The host is paid once a dispatch.
    """

    stages: Roofline
    pp: int
    host_devices: int = 0  # that are joined by fast links; 0: all

    def prefill_s(self, plan: PrefillChunks) -> float:
        raise AssertionError("a ring decodes and does nothing else")

    def decode_s(self, plan: DecodeRows, context_tokens: int) -> float:
        """context_tokens: when the last turn of the dispatch is over."""
        return self._dispatch_s(plan, context_tokens)

    def steps_s(self, plan: DecodeRows, context_tokens: Contexts) -> Times:
        return self._dispatch_s(plan, context_tokens)

    def transfer_bytes(self, transfer: KVTransfer) -> float:
        return self.stages.transfer_bytes(transfer)

    def _dispatch_s(self, plan: DecodeRows, context_tokens: Any) -> Any:
        """Adds and multiplies alone, so that the same goes for an array."""
        active, turns = len(plan.active), plan.num_turns
        read = context_tokens - (plan.most_tokens - active) / 2  # at the mean turn
        ticks, rows = turns * self.pp + self.pp - 1, -(-active // self.pp)
        microbatch = DecodeRows(0, tuple(range(rows)), plan.table_pages)
        through_s = self.stages.decode_s(microbatch, read / self.pp) - self.stages.host_s
        padding = _places(self.stages.model.config, self.pp) * self.pp / self.stages.model.config.num_layers
        return self.stages.host_s + ticks * (through_s * padding / self.pp + self.links_s(rows))

    def links_s(self, rows: int) -> float:
        """Of a tick with so many rows a microbatch."""
        chip = self.stages.chip
        found = [each.sent(self._hosts) for each in self.collectives(rows)]
        sent = sum(found, Sent())
        fixed_s = len(found) * chip.collective_s
        return (
            fixed_s
            + sent.inside / (chip.link_bytes_per_s * chip.link)
            + sent.between / (chip.nic_bytes_per_s * chip.link)
        )

    def collectives(self, rows: int) -> tuple[Collective, ...]:
        """Of a tick, those that tensor parallelism has anyhow left out."""
        model, pp, tp = self.stages.model, self.pp, self.stages.tp
        row_bytes = round(model.row_bytes(rows))
        hops = tuple((place, (place + tp) % (pp * tp)) for place in range(pp * tp))
        columns = tuple(tuple(range(shard, pp * tp, tp)) for shard in range(tp))
        return (
            Collective("all-reduce", row_bytes, (), depth=1),
            Collective("all-reduce", row_bytes, columns, depth=1),
            Collective("all-gather", rows * model.config.vocab_size * LOGIT_BYTES, (), depth=1),
            Collective("collective-permute", row_bytes, hops, depth=1),
        )

    @property
    def _hosts(self) -> tuple[int, ...]:
        devices = self.pp * self.stages.tp
        return tuple(device // (self.host_devices or devices) for device in range(devices))


@cache
def _places(config: ModelConfig, pp: int) -> int:
    return len(ring_cut(config, pp).numbers)
