"""A model that guesses: its guesses are as good as it is, wherever a sequence comes from, and tokens stay the same."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.core.model_config import ModelConfig
from jdisagg.core.request import RequestId, SamplingParams
from jdisagg.core.steps import Admission, History
from jdisagg.core.worker_config import Role
from jdisagg.engine import draft_layers
from jdisagg.engine.draft_layers import LATELY, DraftModel
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.model.sources import RandomSource
from tests.engine.stacks import (
    CONFIG,
    GREEDY,
    SOURCE,
    Steps,
    first_tokens,
    open_machine,
    prefill_machine,
    prefill_plans,
    run_prefill,
    ship_all,
    tokens_of,
)
from tests.steps import decode_plan

DRAFTS, TOKENS = 3, 25
SMALL = ModelConfig("llama", 97, 16, 32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, max_position=128)
PROMPTS = [(5, 6, 7, 5, 9), tuple(range(20)), (1, 2) * 8, (9, 3, 4)]
SAMPLING = [GREEDY, replace(GREEDY, temperature=0.9, seed=7), GREEDY, replace(GREEDY, temperature=1.0, seed=2, top_k=9)]


@cache
def guessing_machine(itself: bool, pp: int = 1) -> MeshExecutor:
    """By the very model that it serves, or by a small one that knows nothing."""
    draft = DraftModel(SOURCE, CONFIG) if itself else DraftModel(RandomSource(SMALL, seed=5), SMALL)
    layers = [range(start, start + 4 // pp) for start in range(0, 4, 4 // pp)]
    devices = jax.devices()[8 - pp :]
    machine = open_machine(Role.DECODE, layers, devices, pp=pp, draft=draft, draft_tokens=DRAFTS)
    machine.warm()
    return machine


def answers(
    machine: MeshExecutor, sampling: list[SamplingParams], plain_steps: int, most: int = 1 + DRAFTS
) -> tuple[list, list[int]]:
    """What each prompt draws: first so many steps of one token, then rows of up to `most`; and the rows' tokens."""
    source = prefill_machine(1)
    source.warm(peers=[machine])
    firsts = first_tokens(run_prefill(source, prefill_plans(PROMPTS, sampling)))
    ship_all(source, machine, [len(prompt) for prompt in PROMPTS])
    admitted = Steps(machine).admissions(PROMPTS, firsts, sampling)
    rows, drawn, step, active = [[first] for first in firsts], list[int](), 0, tuple(range(len(PROMPTS)))
    while active:
        wide = 1 if step < plain_steps else most
        widths = tuple(min(wide, TOKENS - len(rows[slot])) for slot in active)
        plan = decode_plan(step, 0, active, 12, admitted if step == 0 else (), widths=widths)
        for slot, found in machine.run(plan).read().decode:
            assert found is not None
            rows[slot] += found
            drawn += [len(found)] if wide > 1 and widths[active.index(slot)] == wide else []
        step, active = step + 1, tuple(slot for slot in active if len(rows[slot]) < TOKENS)
    return tokens_of(rows), drawn


@pytest.mark.parametrize("plain_steps", [0, 3, LATELY - 1])
def test_a_model_that_guesses_what_it_would_draw_itself_is_always_right(plain_steps: int):
    """At any temperature, after steps without guesses as well: what was drawn meanwhile is read first."""
    machine = guessing_machine(True)
    plain, _ = answers(machine, SAMPLING, TOKENS)
    found, drawn = answers(machine, SAMPLING, plain_steps)
    assert found == plain and drawn and set(drawn) == {1 + DRAFTS}
    assert machine.recompiles() == 0


def test_what_is_more_than_one_guess_reads_is_read_by_several():
    found, drawn = answers(guessing_machine(True), SAMPLING, 2 * LATELY)
    assert found == answers(guessing_machine(True), SAMPLING, TOKENS)[0]
    assert 1 in drawn and drawn[-2:] == [1 + DRAFTS] * 2


@pytest.mark.slow
@pytest.mark.parametrize("pp", [1, 2])
def test_a_model_that_guesses_badly_changes_no_token(pp: int):
    machine = guessing_machine(False, pp)
    plain, _ = answers(machine, SAMPLING, TOKENS)
    found, drawn = answers(machine, SAMPLING, 0)
    assert found == plain and sum(drawn) < 2 * len(drawn) and machine.recompiles() == 0


def test_a_machine_that_decodes_nothing_needs_no_guesses():
    assert open_machine(Role.PREFILL, [range(4)], jax.devices()[:1], draft=DraftModel(SOURCE, CONFIG)).draft is None


def test_a_prompt_is_read_the_same_in_any_chunks(monkeypatch: pytest.MonkeyPatch):
    devices = jax.devices()[7:]
    machine = open_machine(Role.DECODE, [range(4)], devices, draft=DraftModel(SOURCE, CONFIG), draft_tokens=DRAFTS)
    tokens, pages = tuple(each * 5 % 97 for each in range(50)), tuple(range(1, 8))
    admission = Admission(0, RequestId("r"), tokens[-1], 49, pages, GREEDY, 1, History(tokens[:-1], tokens[-1:]))
    found = []
    for size in (16, 64):
        monkeypatch.setattr(draft_layers, "PRIMED", size)
        draft = machine.draft
        assert draft is not None and draft.primed_tokens == size
        draft.kv.pools = [jnp.zeros_like(pool) for pool in draft.kv.pools]
        draft.prime(admission)
        found.append([np.asarray(pool[1:8]) for pool in draft.kv.pools])
    for parted, whole in zip(*found, strict=True):
        assert np.allclose(parted, whole, atol=1e-5) and np.abs(whole).max() > 0.1
