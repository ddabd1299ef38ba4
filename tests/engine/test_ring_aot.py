"""A ring's real programs, compiled to the end for TPUs and GPUs that are not there, on one slice and over two hosts."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import pytest

from jdisagg.core.hardware import Target
from jdisagg.core.layout.kv_layout import KVLayout
from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import Ring, Role, WorkerConfig
from jdisagg.engine.compile_check import memory_of
from jdisagg.engine.ring_declarations import RingTable, abstract_ring_table, ticks
from tests.engine.chips import MODELS, PAGE_SIZE, WIDEST_PAGES, checked_kinds, devices

PP, TP, SLOTS, TURNS = 2, 2, 16, 4


def ring_of(target: str, model: str = "8B") -> RingTable:
    """Two stages of two layers on two devices each; of GPUs, each stage is another host's."""
    config = replace(MODELS[model], num_layers=2 * PP)
    sizes = WorkerConfig(
        WorkerId("ring"), Role.DECODE, 4096, PAGE_SIZE, 8192, SLOTS, Ring(PP, TURNS), (128,), (WIDEST_PAGES,),
    )  # fmt: skip
    layout = KVLayout.of(config, PAGE_SIZE, "bfloat16")
    return abstract_ring_table(sizes, config, layout, devices(Target.parse(target))[: PP * TP], jnp.bfloat16)


@pytest.mark.slow
@pytest.mark.usefixtures("no_kept_programs")
@pytest.mark.parametrize(("target", "hosts"), [("v5p:2x2x1", 1), ("h100:2x2", 2)])
def test_a_ring_compiles_in_place_and_what_it_sends_is_what_it_must(target: str, hosts: int):
    table, chip = ring_of(target), Target.parse(target)
    (turns,) = checked = checked_kinds(table, table.steps(), "ring plain")
    assert turns.facts.collectives == {"all-reduce": 6, "all-gather": 1, "collective-permute": 1}
    model, rows = table.model, SLOTS // PP
    hop, logits = rows * model.hidden_size * 2, rows * model.vocab_size * 4
    sent = turns.facts.sent(turns.declared, [chip.host_of(index) for index in range(PP * TP)])
    assert turns.declared.loops == (ticks(table.config),) == (TURNS * PP + PP - 1,)
    # A tick: two sums a layer, that of what leaves and that of the embedding, the logits' gather, the hop.
    if hosts == 1:
        assert sent.between == 0 and sent.inside >= ticks(table.config) * (6 * hop + hop + 0.75 * logits) * 0.9
    else:
        crossing = ticks(table.config) * (2 * hop / 2 + hop + hop + logits / 4)  # a sum over all, one over stages
        assert crossing * 0.5 < sent.between < crossing * 2
        assert sent.inside >= ticks(table.config) * (4 * hop + logits / 2) * 0.9
    (memory,) = memory_of(table, checked)
    assert (memory.stages, memory.num_devices) == ((0, 1), 4)
    assert memory.kv_bytes >= table.pool_bytes(0) > 0 and memory.temp_bytes > 0
    assert memory.state_bytes == 5 * SLOTS * model.vocab_size
    assert memory.total_bytes < chip.chip.memory_bytes
