"""Programs that go round their layers draw what programs that write them out draw, and leave the same bits behind.

On the CPU layers are written out: here machines are made as on a platform where they are a loop.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jdisagg.core.layout.reshard import StageShape
from jdisagg.core.model_config import Experts, ModelConfig
from jdisagg.core.request import Attempt, RequestId, WorkerId
from jdisagg.core.steps import DecodeRows, KVTransfer, PrefillChunks, StepPlan
from jdisagg.core.worker_config import Role, Stages
from jdisagg.engine import layer_group
from jdisagg.engine.mesh_executor import MeshExecutor, reshaped, shape_of
from jdisagg.model import looped_params
from jdisagg.model.sources import RandomSource
from tests.engine.stacks import (
    CHUNK,
    CONFIG,
    GREEDY,
    PAGE_SIZE,
    WIDEST,
    Steps,
    first_tokens,
    generate,
    greedy_continuation,
    mixed_prompts,
    open_machine,
    prefill_chunk,
    prefill_plans,
    run_prefill,
    source_pages,
    tokens_of,
)

DEEP = replace(CONFIG, num_layers=9)
WORKER = WorkerId("prefill-1")
EVERYWHERE = frozenset({("cpu", False), ("cpu", True)})
UNLIKE = {
    "alike": CONFIG,
    "windows_at_every_other_layer": replace(DEEP, layer_windows=(16, None) * 4 + (16,)),
    "first_layer_without_experts": replace(
        DEEP,
        family="qwen3_moe",
        num_layers=5,
        experts=Experts(number=4, per_token=2, width=16, dense_layers=(0,)),
    ),
}


@pytest.fixture
def looped(monkeypatch: pytest.MonkeyPatch) -> Callable[..., MeshExecutor]:
    """Makes a machine whose layers are a loop in its programs."""

    def make(*arguments: Any, **named: Any) -> MeshExecutor:
        with monkeypatch.context() as patch:
            patch.setattr(looped_params, "LOOPED", EVERYWHERE)
            machine = made(*arguments, **named)
        assert all(group.joined for group in machine.layer_groups)
        return machine

    return make


class Chip(NamedTuple):
    platform: str
    device_kind: str


@pytest.mark.parametrize(
    ("chip", "looped"),
    [(Chip("tpu", "TPU v5"), True), (Chip("tpu", "TPU7x"), False), (Chip("gpu", "NVIDIA H100 80GB HBM3"), False)],
)
def test_layers_are_a_loop_where_no_stack_is_copied_for_it(chip: Chip, looped: bool):
    assert looped_params.loops_on(chip, CONFIG) is looped
    assert not looped_params.loops_on(chip, UNLIKE["first_layer_without_experts"])


def made(role: Role, config: ModelConfig = CONFIG, tp: int = 1, **sizes: Any) -> MeshExecutor:
    devices = jax.devices()[-tp:] if role is Role.DECODE else jax.devices()[:tp]
    return open_machine(role, [range(config.num_layers)], devices, config, RandomSource(config, seed=3), **sizes)


def pools_of(machine: MeshExecutor) -> np.ndarray:
    """[layers, pages but for the null page, ...]."""
    (group,) = machine.layer_groups
    pools = [np.asarray(pool) for pool in group.kv.pools]
    return np.concatenate(pools).reshape(len(group.layers), -1, *pools[0].shape[1:])[:, 1:]


@pytest.mark.slow
@pytest.mark.parametrize("kind", UNLIKE)
def test_a_loop_draws_and_keeps_the_same_bits_as_layers_written_out(kind: str, looped: Callable[..., MeshExecutor]):
    config, prompts = UNLIKE[kind], mixed_prompts(6)
    found = []
    for make in (made, looped):
        source, destination = make(Role.PREFILL, config), make(Role.DECODE, config)
        found.append((tokens_of(generate(source, destination, prompts, 4)), pools_of(source), pools_of(destination)))
    (drawn, sent, kept), (again, sent_again, kept_again) = found
    assert again == drawn
    assert np.array_equal(sent, sent_again) and np.array_equal(kept, kept_again)


@pytest.mark.slow
def test_a_loop_ships_to_layers_written_out_and_compiles_nothing_after_warm_up(looped: Callable[..., MeshExecutor]):
    source, destination, prompts = looped(Role.PREFILL, tp=2), made(Role.DECODE), mixed_prompts(4)
    source.warm(peers=[destination])
    assert tokens_of(generate(source, destination, prompts, 4)) == [row[:5] for row in greedy_continuation(prompts, 5)]
    assert source.recompiles() == 0


def test_layers_written_out_ship_to_a_loop(looped: Callable[..., MeshExecutor]):
    source, destination, prompts = made(Role.PREFILL), looped(Role.DECODE, tp=2), mixed_prompts(4)
    assert tokens_of(generate(source, destination, prompts, 2)) == greedy_continuation(prompts, 3)


@pytest.mark.parametrize("wire", ["int8", "raw"])
def test_layers_of_one_pool_travel_as_those_of_many_do(wire: str, looped: Callable[..., MeshExecutor]):
    """Some of them, with what quantising lost of each, and pages that only fill a bucket up."""
    sent = []
    for make in (made, looped):
        source = make(Role.PREFILL, DEEP)
        run_prefill(source, prefill_plans(mixed_prompts(2, longest=40), [GREEDY] * 2))
        shapes = [StageShape(range(3), 1, PAGE_SIZE, "float32"), StageShape(range(3, 9), 1, PAGE_SIZE, "float32")]
        pages = tuple(range(1, 6))
        transfer = KVTransfer(Attempt(RequestId("0"), 0), WORKER, WORKER, pages, pages, 40, wire=wire)
        packed = source.pack(transfer, shapes)
        sent.append([[np.asarray(part)[:, :5] for part in jax.tree.leaves(each.slices)] for each in packed])
    assert jax.tree.all(jax.tree.map(np.array_equal, *sent))


def test_chunks_beside_decode_rows_find_their_layers_pages(looped: Callable[..., MeshExecutor]):
    machine = looped(Role.COLOCATED, mixed_steps=True)
    running, coming = [(3, 1, 4, 1, 5), (9, 2, 6)], (2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4)
    firsts = first_tokens(run_prefill(machine, prefill_plans(running, [GREEDY] * 2)))
    loop = Steps(machine)
    loop.run(1, loop.admissions(running, firsts, [GREEDY] * 2, source_pages))
    chunk = prefill_chunk(2, coming, 0, len(coming), GREEDY)
    done = machine.run(StepPlan(9, DecodeRows(0, (0, 1), WIDEST), PrefillChunks((chunk,), CHUNK, WIDEST))).read()
    for slot, drawn in done.decode:
        loop.drawn[slot] += drawn or ()
    loop.run(1, active=(0, 1))
    rows = [[first.token, *[each.token for each in loop.drawn[row] if each]] for row, first in enumerate(firsts)]
    assert rows == greedy_continuation(running, 4)
    assert done.first[0][1].token == greedy_continuation([coming], 1)[0][0]


def test_a_loop_becomes_another_machine_and_gets_its_weights_back(
    monkeypatch: pytest.MonkeyPatch, looped: Callable[..., MeshExecutor]
):
    """From two shards to one and from one stage to two; the halves have too few layers for a loop."""
    machine, prompts = looped(Role.COLOCATED, tp=2), mixed_prompts(3)
    shape = shape_of(machine)
    halves = replace(shape, layers=(range(2), range(2, 4)), config=replace(shape.config, decode=Stages(2)))
    monkeypatch.setattr(looped_params, "LOOPED", EVERYWHERE)
    split, held = reshaped(machine, halves)
    assert not held.read_again
    assert tokens_of(generate(split, split, prompts, 3)) == [row[:4] for row in greedy_continuation(prompts, 4)]
    joined, held = reshaped(split, shape)
    assert not held.read_again and joined.layer_groups[0].joined
    assert tokens_of(generate(joined, joined, prompts, 3)) == [row[:4] for row in greedy_continuation(prompts, 4)]


def test_a_deep_stage_is_traced_one_period_long(monkeypatch: pytest.MonkeyPatch, looped: Callable[..., MeshExecutor]):
    calls, run_layer = list[Any](), layer_group.run_layer
    machine = looped(Role.DECODE, UNLIKE["windows_at_every_other_layer"])

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return run_layer(*arguments)

    monkeypatch.setattr(layer_group, "run_layer", counted)
    decode = next(each for each in machine.table.steps() if each.kind == "decode")
    decode.program.lower(*decode.arguments)
    assert len(calls) == 2 + 1  # the period, and the ninth layer behind the loop
