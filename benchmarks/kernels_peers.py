"""What a user would pick instead, on the same shapes: JAX's own kernels, and PyTorch where it can be imported.

JAX's Pallas kernels are imported by name and only when asked for: they warn of their end. Dense peers read KV that
lies in one piece for each sequence, without a page table: an easier task than ours. All take the layout that they like.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.kernels_cases import Case
from benchmarks.kernels_floors import OPERATIONS, Held, Sizes, chained, renewed
from benchmarks.kernels_ours import make_layers, scattered_pages
from benchmarks.kernels_products import ragged_peer
from benchmarks.kernels_timing import Contestant

SHIPPED = "jax.experimental.pallas.ops.gpu."


@dataclass(frozen=True)
class Ground:
    """Where a race is run: the case, its inputs, the platform."""

    case: Case
    held: Held | None
    sizes: Sizes
    platform: str

    @property
    def interpret(self) -> bool:
        return self.platform != "gpu"

    @property
    def uniform(self) -> bool:
        return len(set(self.case.held)) == 1 and len(set(self.case.rows)) <= 1


Maker = Callable[[Ground], Contestant | None]


def peers_of(case: Case) -> dict[str, Maker]:
    """By name; a maker gives None where the peer cannot run the case (too ragged, other layout)."""
    makers: dict[str, dict[str, Maker]] = {
        "paged_attention": {
            "jax Pallas paged_attention": pallas_paged,
            "jax Pallas gqa, dense": pallas_gqa,
            "jax.nn.dot_product_attention, dense": dense_decode,
            "torch SDPA, dense": partial(torch_decode, flex=False),
            "torch FlexAttention, dense": partial(torch_decode, flex=True),
        },
        "prefill_attention": {
            "jax Pallas mha": pallas_mha,
            "jax.nn.dot_product_attention": dense_prefill,
            "torch SDPA": partial(torch_prefill, flex=False),
            "torch FlexAttention": partial(torch_prefill, flex=True),
        },
        "grouped_product": {"jax.lax.ragged_dot": lambda ground: ragged_peer(ground.case, ground.sizes)},
        "pack_kv_pages": {"jnp gather": gather_pages} if case.wire == "raw" else {},
        "unpack_kv_pages": {"jnp scatter": scatter_pages} if case.wire == "raw" else {},
    }
    return makers.get(case.operation, {})


def shipped(module: str) -> Any:
    return importlib.import_module(SHIPPED + module)


# ---------------------------------------------------------------- KV as peers like it


def split_pages(pool: Array) -> tuple[Array, Array]:
    """K and V, [Hkv, P, page_size, D] each."""
    return pool[:, :, 0].swapaxes(0, 1), pool[:, :, 1].swapaxes(0, 1)


def dense(pool: Array, table: Array) -> tuple[Array, Array]:
    """K and V, [B, S, Hkv, D] each."""
    held = pool[table].transpose(3, 0, 1, 4, 2, 5)  # [2, B, W, page_size, Hkv, D]
    keys, values = held.reshape(2, table.shape[0], -1, *held.shape[4:])
    return keys, values


def layers_of(held: Held, form: Callable[..., tuple[Array, Array]], *rest: Array) -> list[tuple[Array, Array]]:
    formed = jax.jit(form)
    return [formed(pool, *rest) for pool in held.pools]


# ---------------------------------------------------------------- decode, JAX


def pallas_paged(ground: Ground) -> Contestant | None:
    held, case = ground.held, ground.case
    assert held is not None
    width = held.table.shape[1]
    splits = max(split for split in (1, 2, 4, 8, 16) if width % split == 0)
    pages = max(size for size in (1, 2, 4, 8) if width // splits % size == 0)
    attend = partial(
        shipped("paged_attention").paged_attention,
        k_splits=splits,
        pages_per_compute_block=pages,
        interpret=ground.interpret,
    )
    scale = case.heads.size**-0.5
    return chained(
        lambda q, kv: attend((q * scale).astype(q.dtype), *kv, held.table, held.lengths),
        held.queries,
        layers_of(held, split_pages),
    )


def pallas_gqa(ground: Ground) -> Contestant | None:
    held = ground.held
    assert held is not None
    length = held.table.shape[1] * ground.case.page_size
    splits = max(split for split in (1, 2, 4, 8, 16) if length // split % 16 == 0)
    block = min(128, length // splits)
    attend = partial(shipped("decode_attention").gqa, k_splits=splits, block_k=block, interpret=ground.interpret)
    return chained(
        lambda q, kv: attend(q, *kv, kv_seq_len=held.lengths), held.queries, layers_of(held, dense, held.table)
    )


def dense_decode(ground: Ground) -> Contestant | None:
    held = ground.held
    assert held is not None
    attend = partial(jax.nn.dot_product_attention, implementation="cudnn" if ground.platform == "gpu" else "xla")
    return chained(
        lambda q, kv: attend(q[:, None], *kv, key_value_seq_lengths=held.lengths)[:, 0],
        held.queries,
        layers_of(held, dense, held.table),
    )


# ---------------------------------------------------------------- prefill, JAX


def whole_prompts(ground: Ground) -> bool:
    """Equal prompts with nothing held before: what dense causal attention can say."""
    return ground.uniform and ground.case.rows == ground.case.held and not ground.case.padding


def in_rows(held: Held, case: Case) -> Array:
    """Queries [B, T, Hq, D]."""
    return held.queries.reshape(len(case.rows), -1, *held.queries.shape[1:])


def pallas_mha(ground: Ground) -> Contestant | None:
    held, case = ground.held, ground.case
    if not whole_prompts(ground):
        return None
    assert held is not None
    groups = case.heads.query // case.heads.kv
    attend = partial(
        shipped("attention").mha,
        segment_ids=None,
        sm_scale=case.heads.size**-0.5,
        causal=True,
        interpret=ground.interpret,
    )
    layers = [
        (jnp.repeat(k, groups, axis=2), jnp.repeat(v, groups, axis=2)) for k, v in layers_of(held, dense, held.table)
    ]
    return chained(lambda q, kv: attend(q, *kv), in_rows(held, case), layers)


def dense_prefill(ground: Ground) -> Contestant | None:
    held = ground.held
    if not whole_prompts(ground):
        return None
    assert held is not None
    implementation = "cudnn" if ground.platform == "gpu" else "xla"
    attend = partial(jax.nn.dot_product_attention, is_causal=True, implementation=implementation)
    return chained(lambda q, kv: attend(q, *kv), in_rows(held, ground.case), layers_of(held, dense, held.table))


# ---------------------------------------------------------------- PyTorch


def torch_on(platform: str) -> Any:
    """The module. Raises ImportError where there is none, or none for the device at hand."""
    torch = importlib.import_module("torch")
    if platform == "gpu" and not torch.cuda.is_available():
        raise ImportError("this torch has no CUDA")
    return torch


def to_torch(torch: Any, array: Array, platform: str) -> Any:
    """A copy on torch's device, heads before tokens: [B, T, H, D] -> [B, H, T, D]."""
    host = torch.from_numpy(np.array(array.astype(jnp.float32))).transpose(1, 2).contiguous()
    dtype = torch.bfloat16 if array.dtype == jnp.bfloat16 else torch.float32
    return host.to(device="cuda" if platform == "gpu" else "cpu", dtype=dtype)


def torch_contestant(torch: Any, attend: Callable[[Any, Any, Any], Any], q: Any, layers: list[Any]) -> Contestant:
    """As `chained`; on CUDA captured once as a graph, so that Python's time between launches does not count."""

    def run() -> Any:
        out = q
        for index in range(OPERATIONS):
            out = attend(out, *layers[index % len(layers)])
        return out

    if not q.is_cuda:
        return Contestant("torch", run, OPERATIONS, lambda _: None)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # compiles and allocates before the capture, on a stream of its own as torch asks
        run()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return Contestant("torch", graph.replay, OPERATIONS, lambda _: torch.cuda.synchronize())


def torch_attend(torch: Any, flex: bool, causal: bool, device: str, tokens: int) -> Callable[[Any, Any, Any], Any]:
    if not flex:
        return partial(torch.nn.functional.scaled_dot_product_attention, is_causal=causal, enable_gqa=True)
    module = importlib.import_module("torch.nn.attention.flex_attention")
    mask = None
    if causal:
        mask = module.create_block_mask(lambda b, h, i, j: i >= j, None, None, tokens, tokens, device=device)
    attend = torch.compile(module.flex_attention) if device == "cuda" else module.flex_attention
    return partial(attend, block_mask=mask, enable_gqa=True)


def torch_race(ground: Ground, queries: Array, flex: bool, causal: bool) -> Contestant:
    """`queries` [B, T, Hq, D] over the dense KV of every layer."""
    torch, held = torch_on(ground.platform), ground.held
    assert held is not None
    q = to_torch(torch, queries, ground.platform)
    layers = [
        tuple(to_torch(torch, part[:, : max(ground.case.held)], ground.platform) for part in kv)
        for kv in layers_of(held, dense, held.table)
    ]
    attend = torch_attend(torch, flex, causal, "cuda" if ground.platform == "gpu" else "cpu", queries.shape[1])
    return torch_contestant(torch, attend, q, layers)


def torch_decode(ground: Ground, flex: bool) -> Contestant | None:
    assert ground.held is not None
    return torch_race(ground, ground.held.queries[:, None], flex, causal=False) if ground.uniform else None


def torch_prefill(ground: Ground, flex: bool) -> Contestant | None:
    if not whole_prompts(ground):
        return None
    assert ground.held is not None
    return torch_race(ground, in_rows(ground.held, ground.case), flex, causal=True)


# ---------------------------------------------------------------- packing


def gather_pages(ground: Ground) -> Contestant | None:
    program = jax.jit(lambda pools, ids: jnp.stack([pool[ids] for pool in pools]))
    return Contestant("gather", partial(program, make_layers(ground.case, ground.sizes), scattered_pages(ground.case)))


def scatter_pages(ground: Ground) -> Contestant | None:
    pools, ids = make_layers(ground.case, ground.sizes), scattered_pages(ground.case)
    blocks = jnp.stack([pool[ids] for pool in pools])

    def program(pools: list[Array], blocks: Array, ids: Array) -> list[Array]:
        return [pool.at[ids].set(block) for pool, block in zip(pools, blocks, strict=True)]

    return renewed("scatter", jax.jit(program, donate_argnums=0), pools, blocks, ids)


def fastest(peers: dict[str, float | str]) -> tuple[str, float] | None:
    """Name and milliseconds of the best peer that ran."""
    ran = {name: value for name, value in peers.items() if not isinstance(value, str)}
    best = min(ran, key=lambda name: ran[name], default=None)
    return None if best is None or not math.isfinite(ran[best]) else (best, ran[best])
