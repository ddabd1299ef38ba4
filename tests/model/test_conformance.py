"""Every family against the float32 logits and greedy tokens that `transformers` computed (tests/fixtures)."""

from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.model.hf_config import read_config
from jdisagg.model.network import forward
from jdisagg.model.params import StageSpec, load_stage
from jdisagg.model.sources import HFSource
from tests.fixtures.conformance import families, load
from tests.model.sharded import mesh_of, run_stage, split_layers, stage_output

LENGTH = 64  # one compiled shape: causal attention makes the padding behind a prompt invisible


def padded(tokens: list[int]) -> np.ndarray:
    return np.array(tokens + [0] * (LENGTH - len(tokens)), np.int32)


@cache
def whole_model(family: str, out_first: bool | None = None) -> Callable[[list[int]], np.ndarray]:
    """A compiled full forward: tokens -> f32[len(tokens), V]."""
    fixture = load(family)
    config = read_config(fixture.folder)
    params = load_stage(
        HFSource(fixture.folder),
        StageSpec(config, range(config.num_layers), mesh_of(1), jnp.float32, out_first=out_first),
    )
    program = jax.jit(lambda leaves, tokens: forward(params.merge(leaves), tokens))
    return lambda tokens: np.asarray(program(params.leaves, padded(tokens)[None]))[0, : len(tokens)]


def test_the_fixtures_hold_every_family():
    assert families() == [
        *("deepseek2", "deepseek3"),
        *("gemma2", "gemma3", "gpt_oss", "llama2", "llama3", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3"),
        "qwen3_moe",
    ]


@pytest.mark.parametrize("out_first", [False, True])
@pytest.mark.parametrize("family", families())
def test_full_forward_logits_equal_those_of_transformers(family: str, out_first: bool):
    fixture = load(family)
    model = whole_model(family, out_first)
    for prompt, expected in zip(fixture.prompts, fixture.logits, strict=True):
        assert np.abs(model(prompt) - expected).max() <= 1e-4


@pytest.mark.parametrize("family", families())
def test_greedy_tokens_equal_those_of_transformers(family: str):
    fixture = load(family)
    model = whole_model(family)
    for prompt, expected in zip(fixture.prompts, fixture.greedy, strict=True):
        tokens = list(prompt)
        for _ in expected:
            tokens.append(int(model(tokens)[-1].argmax()))
        assert tokens[len(prompt) :] == expected


@pytest.mark.parametrize(
    ("tp", "pp", "out_first"),
    [
        *[(tp, pp, False) for tp, pp in ((1, 2), (2, 4), (4, 1), (3, 1), (8, 1))],
        (2, 2, True),
        (5, 1, True),
        (3, 2, True),
    ],
)
@pytest.mark.parametrize("family", families())
def test_sharded_stages_in_a_row_give_the_same_logits(family: str, tp: int, pp: int, out_first: bool):
    fixture = load(family)
    config, source = read_config(fixture.folder), HFSource(fixture.folder)
    x = padded(fixture.prompts[-1])
    for place, layers in enumerate(split_layers(config, pp)):
        mesh = mesh_of(tp, place * tp % 8)
        x = run_stage(
            load_stage(source, StageSpec(config, layers, mesh, jnp.float32, out_first=out_first)), mesh, stage_output, x
        )
    assert np.abs(x[: len(fixture.prompts[-1])] - fixture.logits[-1]).max() <= 1e-4
