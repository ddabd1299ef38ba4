"""Masks of grammars: rows that have one draw what it allows, and nobody beside them notices."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.core.request import BROKEN, SamplingParams
from jdisagg.core.steps import History, Read, StepPlan
from jdisagg.core.worker_config import Role
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.engine.spec.grammar_masks import GrammarMasks, masked
from tests.engine.evens import Evens
from tests.engine.stacks import (
    CONFIG,
    GREEDY,
    HALVES,
    Steps,
    first_tokens,
    mixed_prompts,
    open_machine,
    open_ring,
    prefill_plans,
    run_prefill,
    ship_all,
)
from tests.steps import decode_plan

EVEN = replace(GREEDY, grammar="even", synchronous=True)


def put(host: np.ndarray) -> jax.Array:
    return jax.device_put(host)


def test_a_bit_for_each_token_says_what_may_be_drawn():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(3, 97)), jnp.float32)
    allowed = np.random.default_rng(1).integers(0, 2, (3, 97)).astype(bool)
    padded = np.zeros((3, 128), bool)
    padded[:, :97] = allowed
    words = np.packbits(padded, axis=1, bitorder="little").view(np.uint32)
    assert np.array_equal(masked(logits, jnp.asarray(words)), np.where(allowed, logits, -np.inf))


def test_a_row_without_a_grammar_keeps_every_bit_of_its_logits():
    masks = GrammarMasks(Evens(97), 2, 97, put)
    masks.begin(1, EVEN, History())
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 97)), jnp.float32)
    allowed = masks.allowed([0, 1])
    assert allowed is not None
    found = np.asarray(masked(logits, allowed))
    assert found[0].tobytes() == np.asarray(logits)[0].tobytes()
    assert np.isinf(found[1]).tolist() == [token % 2 == 1 for token in range(97)]


def test_no_mask_is_sent_for_rows_without_a_grammar():
    masks = GrammarMasks(Evens(97), 2, 97, put)
    masks.begin(0, GREEDY, History())
    masks.begin(1, EVEN, History())
    assert masks.allowed([0]) is None
    masks.end(1)
    assert masks.allowed([0, 1]) is None


def test_a_machine_that_knows_no_grammars_lets_a_row_that_has_one_draw_nothing():
    masks = GrammarMasks(None, 1, 97, put)
    masks.begin(0, EVEN, History())
    allowed = masks.allowed([0])
    assert allowed is not None and not np.asarray(allowed).any()


def answers(source: MeshExecutor, destination: MeshExecutor, sampling: list[SamplingParams], steps: int = 4) -> list:
    """Each step is read before the next; `sampling` one a prompt."""
    prompts = mixed_prompts(len(sampling), longest=30)
    firsts = first_tokens(run_prefill(source, prefill_plans(prompts, sampling)))
    ship_all(source, destination, [len(prompt) for prompt in prompts])
    admitted = Steps(destination).admissions(prompts, firsts, sampling)
    rows, active = [[first.token] for first in firsts], tuple(range(len(prompts)))
    turns = destination.config.decode.steps_per_dispatch > 1
    for step in range(steps):
        read = tuple(Read(slot, (rows[slot][-1],)) for slot in active if step and sampling[slot].grammar)
        plan = decode_plan(step, 0, active, 12, admitted if step == 0 else (), widths=(1,) * len(active) * turns)
        assert plan.decode is not None
        done = destination.run(StepPlan(step, replace(plan.decode, read=read))).read()
        for slot, drawn in done.decode:
            rows[slot] += [each.token for each in drawn or ()]
    return rows


def with_grammars(machine: MeshExecutor) -> MeshExecutor:
    machine.place = replace(machine.place, grammars=Evens(CONFIG.vocab_size))
    machine.runner = machine._runner()  # pyright: ignore[reportPrivateUsage]
    return machine


@cache
def pair_of(kind: str) -> tuple[MeshExecutor, MeshExecutor]:
    source = open_machine(Role.PREFILL, HALVES, jax.devices()[:1])
    destination = open_ring(2, turns=2) if kind == "ring" else open_machine(Role.DECODE, (range(4),), jax.devices()[7:])
    return with_grammars(source), with_grammars(destination)


@pytest.mark.parametrize("kind", ["stages", pytest.param("ring", marks=pytest.mark.slow)])
def test_rows_keep_to_their_grammar_and_the_others_draw_as_without_them(kind: str):
    plain = [GREEDY, replace(GREEDY, temperature=0.9, seed=4), GREEDY, replace(GREEDY, temperature=0.7, seed=5)]
    mixed = [plain[0], plain[1], EVEN, replace(EVEN, temperature=0.7, seed=5)]
    source, destination = pair_of(kind)
    without, beside = answers(source, destination, plain), answers(source, destination, mixed)
    assert beside[:2] == without[:2]
    assert all(token % 2 == 0 for row in beside[2:] for token in row)
    assert any(token % 2 for row in without[2:] for token in row)


def test_where_the_grammar_allows_nothing_only_that_answer_is_broken():
    source, destination = pair_of("stages")
    rows = answers(source, destination, [GREEDY, EVEN], steps=7)
    assert rows[1][6] == BROKEN and len(rows[1]) == 7 and BROKEN not in rows[0] and len(rows[0]) == 8
