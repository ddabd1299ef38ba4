"""Layers that are alike are traced once, and those that are not are told from each other."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jdisagg.core.model_config import ModelConfig
from jdisagg.core.worker_config import Role
from jdisagg.engine import layer_group
from jdisagg.model.sources import RandomSource
from tests.engine.stacks import CONFIG, HALVES, open_machine


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModelConfig], int]:
    """How many layers are traced for the decode program of a worker with this model's layers in one stage."""

    def count(config: ModelConfig) -> int:
        calls, layer = list[Any](), layer_group.run_layer

        def counted(*arguments: Any) -> Any:
            calls.append(arguments)
            return layer(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(layer_group, "run_layer", counted)
            whole = [range(config.num_layers)]
            machine = open_machine(Role.DECODE, whole, jax.devices()[:1], config, RandomSource(config, seed=3))
            decode = next(each for each in machine.table.steps() if each.kind == "decode")
            decode.program.lower(*decode.arguments)
        return len(calls)

    return count


def test_four_layers_that_are_alike_are_traced_as_one(traced: Callable[[ModelConfig], int]):
    assert traced(CONFIG) == 1


def test_layers_of_two_kinds_are_traced_as_two(traced: Callable[[ModelConfig], int]):
    """Every other one attends to a window alone."""
    windows = replace(CONFIG, layer_windows=(16, None, 16, None))
    assert traced(windows) == 2


@pytest.mark.parametrize(("dtype", "pools"), [(jnp.float32, [1, 1]), (jnp.bfloat16, [2, 2])])
def test_a_stages_pages_lie_in_one_pool_unless_a_cpu_converts_whole_pools(dtype: Any, pools: list[int]):
    machine = open_machine(Role.DECODE, HALVES, jax.devices()[:2], pp=2, dtype=dtype)
    assert [len(stage.pools) for stage in machine.pages] == pools
    assert [len(each.pools or ()) for each in machine.table.steps() if each.kind == "decode"] == pools
