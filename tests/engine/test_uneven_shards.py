"""Nine query and three KV heads on any number of shards: pages and tokens are those of one device.

Three heads on two shards are two and one beside padding; on four, one shard has none; on eight, six hold a copy of one.
"""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.core.layout.reshard import plan_transfer, prove
from jdisagg.core.layout.tensor_cut import heads_per_shard, kv_heads_of_shard
from jdisagg.core.worker_config import Role
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.kv.pools import PagesOfStage
from jdisagg.kv.shipping import shapes_of
from jdisagg.model.network import forward
from jdisagg.model.params import StageSpec, load_stage
from jdisagg.model.sources import RandomSource
from jdisagg.parallel.submesh import StageMesh
from tests.engine.stacks import (
    CONFIG,
    GREEDY,
    HALVES,
    LONGEST,
    destination_pages,
    generate,
    mixed_prompts,
    open_machine,
    pages_by_layer,
    prefill_plans,
    run_prefill,
    ship_all,
    source_pages,
    tokens_of,
)

NINE = replace(CONFIG, hidden_size=48, intermediate_size=50, num_heads=9, num_kv_heads=3)
SOURCE = RandomSource(NINE, seed=5)
PROMPTS = mixed_prompts(count=6)
TURNS = 7
pytestmark = pytest.mark.slow


@cache
def expected() -> list[list[int]]:
    """By repeated full forwards on one device."""
    params = load_stage(SOURCE, StageSpec(NINE, range(4), StageMesh(jax.devices()[:1]).mesh, jnp.float32))
    program = jax.jit(lambda leaves, tokens: forward(params.merge(leaves), tokens))
    rows = [list(prompt) for prompt in PROMPTS]
    for _ in range(TURNS + 1):
        logits = program(params.leaves, np.array([row + [0] * (LONGEST - len(row)) for row in rows], np.int32))
        for index, row in enumerate(rows):
            row.append(int(logits[index, len(row) - 1].argmax()))
    return [row[len(prompt) :] for row, prompt in zip(rows, PROMPTS, strict=True)]


def machine(role: Role, tp: int, pp: int = 1) -> MeshExecutor:
    layers = HALVES if role is Role.PREFILL or pp == 2 else (range(4),)
    devices = jax.devices()[:tp] if role is Role.PREFILL else jax.devices()[8 - pp * tp :]
    return open_machine(role, layers, devices, NINE, SOURCE, pp)


def heads_of(stage: PagesOfStage, pages: list[int]) -> np.ndarray:
    """These pages' bytes [L, n, Hkv, 2, page_size, D], each head once; all copies agree, and padding is finite."""
    tp, layers = stage.submesh.tp, []
    runs = [kv_heads_of_shard(3, tp, shard) for shard in range(tp)]
    places = np.array([head for run in runs for head in (*run, *[-1] * (heads_per_shard(3, tp) - len(run)))])
    for pool in pages_by_layer(stage):
        found = pool[np.array(pages)]
        assert np.isfinite(found).all()
        copies = [found[:, places == head] for head in range(3)]
        assert all((each == each[:, :1]).all() for each in copies)
        layers.append(np.concatenate([each[:, :1] for each in copies], axis=1))
    return np.stack(layers)


@pytest.mark.parametrize(("tp", "pp", "decode_tp"), [(2, 2, 1), (4, 2, 2), (8, 1, 3)])
def test_tokens_and_pages_are_those_of_one_device_and_nothing_is_compiled_while_serving(
    tp: int, pp: int, decode_tp: int
):
    source, destination = machine(Role.PREFILL, tp), machine(Role.DECODE, decode_tp, pp)
    destination.warm()
    source.warm(peers=[destination])
    assert tokens_of(generate(source, destination, PROMPTS, TURNS)) == expected()
    run_prefill(source, prefill_plans(PROMPTS, [GREEDY] * len(PROMPTS)))
    ship_all(source, destination, [len(prompt) for prompt in PROMPTS])
    for pages in range(len(PROMPTS)):
        length = len(PROMPTS[pages])
        sent = np.concatenate([heads_of(stage, list(source_pages(pages, length))) for stage in source.pages])
        landed = np.concatenate(
            [heads_of(stage, list(destination_pages(pages, length))) for stage in destination.pages]
        )
        assert np.any(sent, axis=(3, 4, 5)).all() and landed.tobytes() == sent.tobytes()
    assert (source.recompiles(), destination.recompiles()) == (0, 0)
    prove(plan_transfer(shapes_of(source.pages), shapes_of(destination.pages), 3, (9, 9)))


def test_a_colocated_worker_of_uneven_shards_gives_the_same_tokens():
    colocated = open_machine(Role.COLOCATED, HALVES, jax.devices()[:8], NINE, SOURCE, 2)
    colocated.warm(peers=[colocated])
    assert tokens_of(generate(colocated, colocated, PROMPTS, TURNS)) == expected()
    assert colocated.recompiles() == 0
