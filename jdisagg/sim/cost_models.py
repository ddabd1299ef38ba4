"""Cost models of a worker: the seconds of its plans, and the bytes of a part of KV.

There are two kinds: lines that others fitted to measurements of one engine (`PublishedFit`), and a roofline of
hardware constants with named efficiencies (`Roofline`). A plan's seconds are those of all its pipeline stages
together. A decode step depends on the batch *and* on the tokens that it reads; with only one of the two, load would
not slow decoding.
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
from jdisagg.sim.hardware import ChipSpec

DISTSERVE = Path(__file__).parent / "data" / "distserve_a100_80g.json"
ENGINES = ("distserve", "vllm")  # engines whose measurements were fitted
MEMORY_SHARE = 0.9  # share of a device's memory for weights and KV; the rest is activations and the runtime


Contexts = npt.NDArray[np.int64]
Times = npt.NDArray[np.float64]


class CostModel(Protocol):
    """The costs of one worker."""

    def prefill_s(self, plan: PrefillChunks) -> float:
        """Returns the seconds of the plan on a device that does nothing else."""
        ...

    def decode_s(self, plan: DecodeRows, context_tokens: int) -> float:
        """Returns the seconds of one step. `context_tokens`: KV tokens that its active slots read, summed."""
        ...

    def transfer_bytes(self, transfer: KVTransfer) -> float:
        """Returns the bytes that the part of KV sends."""
        ...


@runtime_checkable
class VectorCostModel(CostModel, Protocol):
    """A cost model that computes many steps at once as arrays, so that a simulator calls it once per sequence."""

    def steps_s(self, plan: DecodeRows, context_tokens: Contexts) -> Times:
        """Returns `decode_s` for each of context_tokens, i64[N] -> f64[N], bit for bit."""
        ...


@runtime_checkable
class MixedCostModel(CostModel, Protocol):
    """A cost model that knows the seconds of a step of chunks and decode rows together."""

    def mixed_s(self, prefill: PrefillChunks, decode: DecodeRows, context_tokens: int) -> float:
        """Returns the seconds of the step; weights are read once for all rows."""
        ...


def num_sampled(plan: PrefillChunks) -> int:
    """Returns the number of the plan's rows for which a token is sampled."""
    return sum(chunk.last for chunk in plan.chunks)


@dataclass(frozen=True, slots=True)
class Model:
    """The configuration and KV dtype of a model."""

    config: ModelConfig
    dtype: str = "bfloat16"

    def kv_bytes(self, tokens: float, tp: int = 1) -> float:
        """Returns the KV bytes of all layers on one of `tp` shards."""
        return self.config.kv_bytes(tokens, number_bytes(self.dtype), tp)

    def part_bytes(self, transfer: KVTransfer) -> float:
        """Returns the bytes of a part: its tokens in its own layers."""
        layers = self.config.num_layers
        first, stop = transfer.layers or (0, layers)
        return self.kv_bytes(transfer.num_tokens) * (stop - first) / layers

    def row_bytes(self, rows: int) -> float:
        """Returns the bytes of the activations that a layer passes on."""
        return rows * self.config.hidden_size * number_bytes(self.dtype)


def all_reduce_s(size_bytes: float, tp: int, bytes_per_s: float, fixed_s: float) -> float:
    """Returns the seconds of a ring all-reduce: 2 (tp - 1) / tp of the bytes per link; 0 for one device."""
    return fixed_s + size_bytes * 2 * (tp - 1) / tp / bytes_per_s if tp > 1 else 0.0


def _over(formula: Callable[[DecodeRows, Any], Any], plan: DecodeRows, context_tokens: Contexts) -> Times:
    """Applies a formula of additions and multiplications to an array."""
    return formula(plan, context_tokens)


@dataclass(frozen=True, slots=True)
class LinearCost:
    """The linear form a + b·x + c·y, in seconds."""

    a: float
    b: float
    c: float

    def at(self, x: float, y: float) -> float:
        return self.a + self.b * x + self.c * y


@dataclass(frozen=True, slots=True)
class PublishedFit:
    """Published fits: prefill = a + b·Σlen + c·Σlen²; decode = a + b·context + c·batch, one fit per batch range. The
    source is DistServe (OSDI'24). A chunk from token s to token e counts e² - s² of the squares, as its queries
    attend."""

    model: Model
    prefill: LinearCost
    small: LinearCost  # decode, batch below `threshold`
    large: LinearCost
    threshold: int
    host_s: float = 0.0  # host time per plan

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
    """Returns the fits on A100-80G in FP16 of opt-13b (TP 1, 2, 4) and opt-66b (TP 2, 3, 4, 8). Raises ConfigError."""
    sizes = _among(_among(_distserve(), engine, "engine"), name, "model")
    row = _among(sizes, str(tp), f"{name} at tp")
    lines = [LinearCost(*(each / 1e3 for each in row[kind])) for kind in ("prefill", "decode_small", "decode_large")]
    return PublishedFit(Model(model(name), "float16"), *lines, threshold=row["threshold"], host_s=host_s)


def distserve_kv_tokens(name: str, tp: int, pp: int) -> int:
    """Returns the KV capacity in tokens of the engine on `tp` x `pp` A100-80G. Raises ConfigError if not published."""
    return _among(_among(_distserve()["kv_tokens"], name, "model"), f"tp{tp}pp{pp}", f"{name} on")


@dataclass(frozen=True, slots=True)
class Roofline:
    """Costs of `tp` devices, each with 1/tp of the weights and heads; efficiencies are those of the hardware.

    Linear work takes the longer of its FLOPs and its weights' bytes, for the layers' matrices and the head
    separately. If the chip multiplies the weights' dtype faster, activations are assumed to have that dtype too. A
    step multiplies by the experts that each token is routed to, and reads those that at least one token is expected
    to be routed to.

    Attention takes the FLOPs of the pairs below the diagonal in prefill, and the bytes of the KV read in decode; for
    latents, which many heads share, their FLOPs if those take longer. With tp > 1 there are two all-reduces per
    layer (ring: 2 (tp - 1) / tp of the bytes). The embedding lookup is left out.
    """

    model: Model
    chip: ChipSpec
    tp: int = 1
    weight_dtype: str = "bfloat16"
    host_s: float = 1e-3  # host time per plan

    def prefill_s(self, plan: PrefillChunks) -> float:
        return self.host_s + self._linear_s(plan.num_tokens) + self._pairs_s(plan) + self._head_s(num_sampled(plan))

    def decode_s(self, plan: DecodeRows, context_tokens: int) -> float:
        """Returns the seconds of a dispatch. Each of its steps reads all weights and its KV; the host is paid once."""
        batch, steps = len(plan.active), plan.num_turns
        read = context_tokens - (plan.most_tokens - batch) / 2 if steps > 1 else context_tokens  # at the mean step
        return self.host_s + steps * (self._linear_s(batch) + self._read_s(read) + self._head_s(batch))

    def mixed_s(self, prefill: PrefillChunks, decode: DecodeRows, context_tokens: int) -> float:
        batch = len(decode.active)
        attention_s = self._pairs_s(prefill) + self._read_s(context_tokens)
        linear_s = self._linear_s(prefill.num_tokens + batch) + self._head_s(num_sampled(prefill) + batch)
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
        """Returns the seconds of reading KV, linear in context_tokens, which may be an array. One token's bytes and
        FLOPs decide which of the two takes longer."""
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
        """Returns the seconds of one shard's matrices. `active`: weights that each row multiplies by. `read`: weights
        that all rows together read."""
        compute_s = 2 * active * rows / (self.chip.flops_of(self.weight_dtype) * self.chip.gemm)
        read_bytes = read * number_bytes(self.weight_dtype)
        return max(compute_s, read_bytes / (self.chip.hbm_bytes_per_s * self.chip.skinny))

    @property
    def weight_bytes(self) -> float:
        """Returns the bytes of all shards together."""
        return self.model.config.num_params(self.tp) * number_bytes(self.weight_dtype)

    def _collectives_s(self, rows: int) -> float:
        bytes_per_s = self.chip.link_bytes_per_s * self.chip.link
        one_s = all_reduce_s(self.model.row_bytes(rows), self.tp, bytes_per_s, self.chip.collective_s)
        return 2 * self.model.config.num_layers * one_s

    def kv_tokens(self, pp: int = 1) -> int:
        """Returns the KV tokens that fit beside the weights on tp x pp devices. Raises ConfigError if weights do not
        fit.
        """
        room = MEMORY_SHARE * self.chip.hbm_bytes * self.tp * pp - self.weight_bytes
        if room <= 0:
            devices = f"{self.tp * pp} x {self.chip.name}"
            raise ConfigError(f"{self.model.config.family}: {self.weight_bytes:.3g} bytes of weights, over {devices}")
        return int(room // (self.tp * self.model.kv_bytes(1, self.tp)))


# The seconds of a ring's dispatch from the arithmetic of its program: ticks, and the bytes sent at each.

LOGIT_BYTES = 4  # logits are gathered in float32


@dataclass(frozen=True, slots=True)
class RingRoofline:
    """Costs of a ring of `pp` stages, each on devices of the roofline `stages`.

    A dispatch of n steps has n * pp + pp - 1 ticks. At each tick every stage runs one of pp microbatches through its
    layers, padding included, and the head is cut over all shards. A tick has four collectives: the sum of the
    embedding's rows, that of the activations that leave, the gather of the logits, and the hop to the next stage.
    Bytes between hosts go over the NICs. The host is paid once per dispatch.
    """

    stages: Roofline
    pp: int
    host_devices: int = 0  # devices joined by fast links; 0: all

    def prefill_s(self, plan: PrefillChunks) -> float:
        raise AssertionError("a ring decodes and does nothing else")

    def decode_s(self, plan: DecodeRows, context_tokens: int) -> float:
        """Returns the seconds of a dispatch; `context_tokens` are those after its last step."""
        return self._dispatch_s(plan, context_tokens)

    def steps_s(self, plan: DecodeRows, context_tokens: Contexts) -> Times:
        return self._dispatch_s(plan, context_tokens)

    def transfer_bytes(self, transfer: KVTransfer) -> float:
        return self.stages.transfer_bytes(transfer)

    def _dispatch_s(self, plan: DecodeRows, context_tokens: Any) -> Any:
        """Computes by additions and multiplications alone, so that arrays work too."""
        active, steps = len(plan.active), plan.num_turns
        read = context_tokens - (plan.most_tokens - active) / 2  # at the mean step
        ticks, rows = steps * self.pp + self.pp - 1, -(-active // self.pp)
        microbatch = DecodeRows(0, tuple(range(rows)), plan.table_pages)
        stages_s = self.stages.decode_s(microbatch, read / self.pp) - self.stages.host_s
        padding = _places(self.stages.model.config, self.pp) * self.pp / self.stages.model.config.num_layers
        return self.stages.host_s + ticks * (stages_s * padding / self.pp + self.links_s(rows))

    def links_s(self, rows: int) -> float:
        """Returns the seconds of a tick's collectives with `rows` rows per microbatch."""
        chip = self.stages.chip
        traffic = [each.sent(self._hosts) for each in self.collectives(rows)]
        sent = sum(traffic, Sent())
        fixed_s = len(traffic) * chip.collective_s
        return (
            fixed_s
            + sent.inside / (chip.link_bytes_per_s * chip.link)
            + sent.between / (chip.nic_bytes_per_s * chip.link)
        )

    def collectives(self, rows: int) -> tuple[Collective, ...]:
        """Returns the collectives of a tick, without those of tensor parallelism."""
        model, pp, tp = self.stages.model, self.pp, self.stages.tp
        row_bytes = round(model.row_bytes(rows))
        hops = tuple((device, (device + tp) % (pp * tp)) for device in range(pp * tp))
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
