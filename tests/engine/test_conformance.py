"""Every family served over two meshes, in chunks, against the greedy tokens that `transformers` computed."""

import jax
import pytest

from jdisagg.core.worker_config import Role
from jdisagg.model.hf_config import read_config
from jdisagg.model.sources import HFSource
from tests.engine.stacks import GREEDY as GREEDY_PARAMS
from tests.engine.stacks import Turns, first_tokens, open_machine, prefill_plans, run_prefill, ship_all, tokens_of
from tests.fixtures.conformance import families, load

# TP of the prefill mesh, PP of the decode mesh; every pair of them is tried on one model in the test of the handoff.
MESHES = {"llama2": (1, 1), "llama3": (4, 4), "mistral": (2, 4), "qwen2": (4, 1), "qwen3": (2, 2)}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "tp", "pp"), [(family, *MESHES[family]) for family in families()])
def test_a_family_is_served_over_two_meshes_as_transformers_computes_it(family: str, tp: int, pp: int):
    fixture = load(family)
    config, source = read_config(fixture.folder), HFSource(fixture.folder)
    half = config.num_layers // pp
    layers = [range(start, start + half) for start in range(0, config.num_layers, half)]
    prefill = open_machine(Role.PREFILL, layers, jax.devices()[:tp], config, source)
    decode = open_machine(Role.DECODE, layers, jax.devices()[8 - pp :], config, source, pp)
    prompts, sampling = [tuple(prompt) for prompt in fixture.prompts], [GREEDY_PARAMS] * len(fixture.prompts)
    firsts = first_tokens(run_prefill(prefill, prefill_plans(prompts, sampling)))
    ship_all(prefill, decode, [len(prompt) for prompt in prompts])
    loop = Turns(decode)
    loop.run(len(fixture.greedy[0]) - 1, loop.admissions(prompts, firsts, sampling))
    rows = [[first, *loop.drawn[index]] for index, first in enumerate(firsts)]
    assert tokens_of(rows) == fixture.greedy
