"""Experts against a plain definition: every router, any number of shards, few rows and many."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jdisagg.core.model_config import ROUTERS, Experts, ModelConfig
from jdisagg.model.experts import ALPHA, LIMIT, ExpertLayer, route
from jdisagg.model.network import expert_mlp

HIDDEN, WIDTH = 16, 8


def config_of(experts: Experts) -> ModelConfig:
    return ModelConfig("qwen3_moe", 32, HIDDEN, 24, 2, 2, 2, 8, 64, experts=experts)


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max())
    return powers / powers.sum()


def defined_route(experts: Experts, logits: np.ndarray, correction: np.ndarray) -> dict[int, float]:
    """Expert -> weight for one token, as the papers say it; of equals the first."""
    scores = 1 / (1 + np.exp(-logits)) if experts.router == "sigmoid" else softmax(logits)
    wanted = logits if experts.router == "chosen" else scores + correction
    size = experts.number // experts.groups
    groups = [sorted(wanted[g * size : (g + 1) * size])[-experts.group_top :] for g in range(experts.groups)]
    kept = sorted(range(experts.groups), key=lambda g: (-np.sum(groups[g]), g))[: experts.kept_groups]
    allowed = [expert for expert in range(experts.number) if expert // size in kept]
    chosen = sorted(allowed, key=lambda expert: (-wanted[expert], expert))[: experts.per_token]
    weights = softmax(logits[chosen]) if experts.router == "chosen" else scores[chosen]
    if experts.normalised:
        weights = weights / weights.sum()
    return dict(zip(chosen, weights * (1 if experts.router == "chosen" else experts.scale), strict=True))


def defined(module: ExpertLayer, x: np.ndarray) -> np.ndarray:
    """All of it, one token and one expert after another, in f64."""
    experts = module.experts
    values = {
        name: np.asarray(param, np.float64) for name, param in vars(module).items() if isinstance(param, nnx.Param)
    }
    out = np.zeros_like(x, np.float64)
    for row, token in enumerate(x.astype(np.float64)):
        logits = values["router"] @ token + values.get("router_bias", 0)
        weights = defined_route(experts, logits, values.get("correction", np.zeros(experts.number)))
        for expert, weight in weights.items():
            channels = values["gate_up"][expert].T @ token + (values["gate_up_bias"][expert] if experts.bias else 0)
            gate, up = channels[: experts.width], channels[experts.width :]
            if experts.clamped:
                gate, up = np.minimum(gate, LIMIT), np.clip(up, -LIMIT, LIMIT)
                inner = gate / (1 + np.exp(-ALPHA * gate)) * (up + 1)
            else:
                inner = gate / (1 + np.exp(-gate)) * up
            out[row] += weight * (
                values["down"][expert].T @ inner + (values["down_bias"][expert] if experts.bias else 0)
            )
    return out


def module_of(experts: Experts, seed: int = 0) -> ExpertLayer:
    """With every parameter drawn, biases as well."""
    module = expert_mlp(config_of(experts), tp=1, axis=None, dtype=jnp.float32, rngs=nnx.Rngs(seed))
    random = np.random.default_rng(seed)
    for name, param in list(vars(module).items()):
        if isinstance(param, nnx.Param):
            setattr(module, name, nnx.Param(jnp.asarray(random.normal(0, 0.5, param[...].shape), jnp.float32)))
    return module


def rows_of(number: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, (number, HIDDEN)).astype(np.float32)


@st.composite
def routers(draw: st.DrawFn) -> Experts:
    groups, size = draw(st.integers(1, 3)), draw(st.integers(2, 4))
    kept = draw(st.integers(1, groups))
    router = draw(st.sampled_from(ROUTERS))
    if router == "chosen":
        groups, kept = 1, 1
    return Experts(
        groups * size,
        draw(st.integers(1, kept * size)),
        WIDTH,
        router,
        normalised=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
        groups=groups,
        kept_groups=kept,
        group_top=draw(st.integers(1, 2)),
        router_bias=draw(st.booleans()),
        bias=draw(st.booleans()),
        clamped=draw(st.booleans()),
    )


@settings(max_examples=40, deadline=None)
@given(routers(), st.integers(1, 9), st.integers(0, 5))
def test_every_kind_of_router_sends_tokens_where_the_definition_does(experts: Experts, number: int, seed: int):
    random = np.random.default_rng(seed)
    logits, correction = random.normal(0, 1, (number, experts.number)), random.normal(0, 0.2, experts.number)
    correction = correction if experts.router == "sigmoid" else 0 * correction
    given_correction = jnp.asarray(correction, jnp.float32) if experts.router == "sigmoid" else None
    chosen, weights = route(experts, jnp.asarray(logits, jnp.float32), given_correction)
    for row in range(number):
        expected = defined_route(experts, logits[row], correction)
        assert chosen[row].tolist() == list(expected)
        assert weights[row].tolist() == pytest.approx(list(expected.values()), rel=1e-5)


@pytest.mark.parametrize("router", ROUTERS)
def test_of_equal_experts_the_first_are_taken(router: str):
    experts = Experts(6, 3, WIDTH, router, normalised=True)
    chosen, weights = route(experts, jnp.zeros((2, 6)))
    assert chosen.tolist() == [[0, 1, 2]] * 2
    assert weights.tolist() == [pytest.approx([1 / 3] * 3)] * 2


PLAIN = Experts(5, 2, WIDTH, normalised=True)
ALL_OPTIONS = Experts(6, 3, WIDTH, "sigmoid", True, 2.5, 3, 2, 2, router_bias=True, bias=True, clamped=True)


@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("experts", [PLAIN, ALL_OPTIONS, replace(PLAIN, router="chosen", bias=True)])
def test_experts_give_what_the_definition_gives(experts: Experts, rows: int):
    module, x = module_of(experts), rows_of(rows)
    assert np.abs(np.asarray(jax.jit(module.__call__)(x)) - defined(module, x)).max() < 1e-4


@pytest.mark.parametrize("rows", [2, 70])
def test_all_tokens_may_go_to_one_expert_and_none_to_another(rows: int):
    experts = Experts(4, 1, WIDTH, "chosen", router_bias=True)
    module, x = module_of(experts), rows_of(rows)
    module.router_bias = nnx.Param(jnp.asarray([0.0, 0.0, 100.0, -100.0]))
    module.gate_up = nnx.Param(module.gate_up[...].at[3].set(jnp.nan))  # of an expert that nobody asks
    found = np.asarray(jax.jit(module.__call__)(x))
    assert np.abs(found - defined(module, x)).max() < 1e-4


@pytest.mark.parametrize("rows", [5, 70])
def test_a_row_that_is_no_number_is_nobody_elses(rows: int):
    module, x = module_of(PLAIN), rows_of(rows)
    run = jax.jit(module.__call__)
    sound = np.asarray(run(x))
    for broken in (np.nan, np.inf):
        spoilt = x.copy()
        spoilt[2] = broken
        found = np.asarray(run(spoilt))
        assert np.isnan(found[2]).all()
        np.testing.assert_array_equal(np.delete(found, 2, 0), np.delete(sound, 2, 0))


def test_leading_dimensions_are_free():
    module, x = module_of(PLAIN), jnp.asarray(rows_of(6))
    np.testing.assert_allclose(module(x.reshape(2, 3, HIDDEN)).reshape(6, HIDDEN), module(x), atol=1e-6)
