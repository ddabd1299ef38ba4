"""Every family over pairs of meshes, in chunks, against the greedy tokens that `transformers` computed.

A family goes over one pair of widths, and all pairs are met by some family; with -m hostile over three, so that of
family, prefill width and decode width every two values meet: family number f goes from width number p to p + f. Each
family's shards and stages, cut every way, are held to the same fixtures in `tests/model/test_conformance.py`.
"""

from functools import cache

import jax
import pytest

from jdisagg.core.worker_config import Role
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.model.hf_config import read_config
from jdisagg.model.sources import HFSource
from tests.engine.stacks import HALVES, generate, open_machine, tokens_of
from tests.fixtures.conformance import families, load

WIDTHS = (1, 2, 4)


@cache
def machine_of(role: Role, family: str, width: int) -> MeshExecutor:
    """Prefill of TP `width` on the first devices, decode of PP `width` on the last; one family's are kept at a time."""
    folder = load(family).folder
    config, source = read_config(folder), HFSource(folder)
    if role is Role.PREFILL:
        return open_machine(role, HALVES, jax.devices()[:width], config, source)
    size = config.num_layers // width
    stages = [range(start, start + size) for start in range(0, config.num_layers, size)]
    return open_machine(role, stages, jax.devices()[8 - width :], config, source, width)


FIRST = {family: place // len(WIDTHS) % len(WIDTHS) for place, family in enumerate(families())}  # prefill width numbers
REST = [(family, number) for family in FIRST for number in range(len(WIDTHS)) if number != FIRST[family]]


def decode_number(family: str, number: int) -> int:
    return (number + families().index(family)) % len(WIDTHS)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("family", "number"), [*FIRST.items(), *(pytest.param(*each, marks=pytest.mark.hostile) for each in REST)]
)
def test_a_family_is_served_over_pairs_of_meshes_as_transformers_computes_it(family: str, number: int):
    fixture = load(family)
    prompts = [tuple(prompt) for prompt in fixture.prompts]
    steps = len(fixture.greedy[0]) - 1
    tp, pp = WIDTHS[number], WIDTHS[decode_number(family, number)]
    source, destination = machine_of(Role.PREFILL, family, tp), machine_of(Role.DECODE, family, pp)
    assert tokens_of(generate(source, destination, prompts, steps)) == fixture.greedy, (tp, pp)
    machine_of.cache_clear()


def test_every_pair_of_widths_is_met_by_some_family():
    met = {(number, decode_number(family, number)) for family, number in FIRST.items()}
    assert len(met) == len(WIDTHS) ** 2
