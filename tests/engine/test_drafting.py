"""Rows that verify a draft draw the tokens that rows of one token would have drawn, in fewer steps."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.request import BROKEN
from jdisagg.core.steps import History
from jdisagg.core.worker_config import MAX_NGRAM, MIN_NGRAM, Role
from jdisagg.engine.decode import ENABLED, MASKED, POSITION, STOPPED, TOKEN, advanced
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.engine.sampling import SamplingRows
from jdisagg.engine.spec.drafting import FREE, NO_GUESS, guessed, noted, noted_late, taken, widened
from jdisagg.engine.spec.grammar_masks import GrammarMasks
from tests.engine.answers import answers, speaking
from tests.engine.evens import Evens, Fours
from tests.engine.stacks import (
    CONFIG,
    GREEDY,
    HALVES,
    LONGEST,
    open_machine,
    tokens_of,
)
from tests.steps import decode_plan

DRAFTS = 3


def state_of(tokens: list[list[int]]) -> tuple[jax.Array, jax.Array]:
    """(history, state) of slots that hold these tokens, the last of each fed next."""
    history = np.zeros((len(tokens), LONGEST), np.int32)
    for row, each in enumerate(tokens):
        history[row, : len(each)] = each
    ends, ones = [len(each) - 1 for each in tokens], [1] * len(tokens)
    return jnp.asarray(history), jnp.asarray([[each[-1] for each in tokens], ends, [0] * len(tokens), ones], jnp.int32)


def expected_guess(tokens: list[int]) -> list[int]:
    """The definition of `guessed`, in plain Python."""
    for alike in range(MAX_NGRAM, MIN_NGRAM - 1, -1):
        for end in range(len(tokens) - 2, alike - 2, -1):
            if tokens[end - alike + 1 : end + 1] == tokens[-alike:] and len(tokens) >= alike:
                period = len(tokens) - 1 - end
                return [tokens[end + 1 + i % period] for i in range(DRAFTS)]
    return [NO_GUESS] * DRAFTS


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=4, max_size=4))
def test_a_guess_is_what_followed_the_longest_end_that_stood_there_before(tokens: list[list[int]]):
    assert np.asarray(guessed(*state_of(tokens), DRAFTS)).tolist() == [expected_guess(each) for each in tokens]


@given(st.data())
def test_a_draft_is_taken_as_far_as_it_is_what_is_drawn(data: st.DataObject):
    """Draws are a function of the position, as those of a request are."""
    token = st.integers(0, 2)
    tokens = data.draw(st.lists(st.lists(token, min_size=2, max_size=8), min_size=3, max_size=3))
    answers = np.array(data.draw(st.lists(st.lists(token, min_size=16, max_size=16), min_size=3, max_size=3)), np.int32)
    widths = data.draw(st.lists(st.integers(1, 1 + DRAFTS), min_size=3, max_size=3))
    rows = SamplingRows(3)
    rows.set(1, replace(GREEDY, stop_token_ids=(2,)), 0)
    metadata, (history, state) = rows.on(jax.device_put), state_of(tokens)

    wide = widened(history, state, jnp.asarray(widths, jnp.int32), jnp.full((3, DRAFTS), FREE))
    places = np.asarray(wide[POSITION]).reshape(3, -1) + 1
    drawn = jnp.asarray(np.take_along_axis(answers, places, axis=1).reshape(-1))
    found, after, told = taken(history, state, wide, drawn, metadata)
    reported, made = np.asarray(told)[:, :-1], np.asarray(told)[:, -1]

    guess = np.asarray(guessed(history, state, DRAFTS))
    for row in range(3):
        told = [each for each in np.asarray(reported)[row].tolist() if each != MASKED]
        assert 1 <= len(told) <= widths[row]
        assert told == answers[row, len(tokens[row]) : len(tokens[row]) + len(told)].tolist()
        assert told[:-1] == guess[row, : len(told) - 1].tolist()
        assert made[row] == np.sum(guess[row, : widths[row] - 1] >= 0)
        if len(told) < widths[row] and not np.asarray(after)[STOPPED, row]:
            assert guess[row, len(told) - 1] != told[-1], "what was guessed rightly goes on"
    one, kept = state, history
    for step in range(1 + DRAFTS):
        still = jnp.asarray(np.asarray(reported)[:, step] != MASKED)
        masked = one.at[ENABLED].set(still.astype(jnp.int32))
        drawn = jnp.asarray(answers[np.arange(3), np.asarray(one[POSITION]) + 1])
        one, _ = advanced(masked, drawn, metadata)
        kept = noted(kept, one)
    assert np.array_equal(np.asarray(after)[:ENABLED], np.asarray(one)[:ENABLED])
    assert np.array_equal(found, kept) and np.asarray(after)[TOKEN].tolist() == np.asarray(one)[TOKEN].tolist()


@given(st.data())
def test_tokens_that_are_noted_late_are_those_that_would_have_been_noted_at_once(data: st.DataObject):
    slots, steps, token = 3, 6, st.integers(0, 9)
    history, state = state_of(data.draw(st.lists(st.lists(token, min_size=1, max_size=5), min_size=3, max_size=3)))
    metadata = SamplingRows(slots).on(jax.device_put)
    drawn, at_once, going = [], history, state
    for _ in range(steps):
        active = data.draw(st.lists(st.integers(0, 1), min_size=3, max_size=3))
        tokens = data.draw(st.lists(st.one_of(token, st.just(BROKEN)), min_size=3, max_size=3))
        going, told = advanced(going.at[ENABLED].set(jnp.array(active)), jnp.asarray(tokens, jnp.int32), metadata)
        at_once = noted(at_once, going)
        drawn.append(told)
    nothing = jnp.full(slots, MASKED, jnp.int32)
    late = np.asarray(noted_late(history, going, nothing, nothing, *drawn))
    for row in range(slots):
        if not np.asarray(going)[STOPPED, row]:
            assert late[row].tolist() == np.asarray(at_once)[row].tolist()


@cache
def drafting_machine(pp: int) -> MeshExecutor:
    size = 4 // pp
    layers = [range(start, start + size) for start in range(0, 4, size)]
    machine = open_machine(Role.DECODE, layers, jax.devices()[8 - pp :], pp=pp, draft_tokens=DRAFTS, draft_auto=True)
    assert machine.config.draft_sizes == (1, DRAFTS)
    machine.warm()
    return machine


@pytest.mark.parametrize("pp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_tokens_are_those_of_rows_of_one_token_and_steps_are_fewer(pp: int):
    prompts = [(5, 6, 7, 5, 6, 7, 5, 6), tuple(range(20)), (1, 2) * 8, (9, 3, 4)]
    sampling = [
        *(GREEDY, replace(GREEDY, temperature=0.4, seed=7, logprobs=2)),
        *(replace(GREEDY, logprobs=3), replace(GREEDY, repetition_penalty=1.3, presence_penalty=0.2)),
    ]
    machine = drafting_machine(pp)
    before = machine.recompiles()
    (plain, many), (drafted, few) = (answers(machine, prompts, sampling, most) for most in (1, 1 + DRAFTS))
    assert tokens_of(drafted) == tokens_of(plain)
    for row, same in zip(drafted[1:3], plain[1:3], strict=True):
        assert [each.logprob for each in row] == pytest.approx([each.logprob for each in same], abs=1e-5)
        assert [len(each.top) for each in row] == [len(each.top) for each in same]
    assert machine.recompiles() == before == 0
    free = [replace(each, repetition_penalty=1.0, presence_penalty=0.0) for each in sampling]
    (plain, many), (short, fewer), (drafted, few) = (answers(machine, prompts, free, most) for most in (1, 2, 4))
    assert tokens_of(drafted) == tokens_of(short) == tokens_of(plain) and few < 0.8 * many and few < fewer < many


def test_penalties_look_at_the_guesses_in_front_of_a_row_as_at_what_was_drawn():
    """Two of the rows go round in circles which penalties keep them from."""
    prompts = [(5, 6, 7, 5, 6, 7, 5, 6), (1, 2) * 8, (9, 3, 4) * 3, (4,) * 9]
    sampling = [
        *(replace(GREEDY, presence_penalty=0.4), replace(GREEDY, frequency_penalty=0.2, temperature=0.5, seed=3)),
        *(replace(GREEDY, repetition_penalty=1.02), replace(GREEDY, frequency_penalty=-1.5)),
    ]
    machine = drafting_machine(1)
    (plain, many), (drafted, few) = (answers(machine, prompts, sampling, most) for most in (1, 1 + DRAFTS))
    assert tokens_of(drafted) == tokens_of(plain) and few < 0.9 * many
    assert machine.recompiles() == 0


def test_what_a_grammar_forces_is_drawn_several_tokens_a_step_and_they_are_the_same():
    prompts = [(5, 6, 7, 5, 6, 7, 5, 6), tuple(range(20)), (1, 2) * 8, (9, 3, 4)]
    held = replace(GREEDY, grammar="fours", synchronous=True)
    sampling = [held, replace(held, temperature=0.8, seed=7, logprobs=2), GREEDY, replace(held, presence_penalty=0.4)]
    machine = drafting_machine(1)
    with speaking(machine, Fours(CONFIG.vocab_size)):
        (plain, many), (drafted, few) = (answers(machine, prompts, sampling, most) for most in (1, 1 + DRAFTS))
    assert tokens_of(drafted) == tokens_of(plain) and few < 0.8 * many
    for row in (0, 1, 3):
        tokens = tokens_of(drafted)[row]
        assert all(token == tokens[at - at % 4] % 40 + at % 4 for at, token in enumerate(tokens) if at % 4)
    assert [each.logprob for each in drafted[1]] == pytest.approx([each.logprob for each in plain[1]], abs=1e-5)
    assert machine.recompiles() == 0


def test_where_nothing_is_guessed_rows_draw_only_what_a_grammar_forces_at_once():
    masks = GrammarMasks(Fours(CONFIG.vocab_size), 2, CONFIG.vocab_size, jax.device_put)
    held = replace(GREEDY, grammar="fours", synchronous=True, stop_token_ids=(33,))
    history = History((1, 2, 3, 30, 31), (30,)), History((1, 2, 3, 1, 2), (20, 21, 22, 23))
    for guesses, drafts in ((True, [(31, 32), (21, 22, 23)]), (False, [(31, 32), ()])):
        for row, each in enumerate(history):
            masks.begin(row, held, each)
        masks.take(1, (20,) if guesses else ())
        masks.make_drafts({0: 1 + DRAFTS, 1: 1 + DRAFTS}, guesses=guesses)
        assert [masks.places[row].draft for row in range(2)] == drafts, "a stop token is drawn, never drafted"


def test_a_row_with_a_grammar_keeps_to_it_beside_rows_that_draw_drafts():
    prompts, even = [(1, 2) * 8, (5, 6, 7, 5, 6, 7, 5, 6)], replace(GREEDY, grammar="even", synchronous=True)
    machine = drafting_machine(1)
    alone, _ = answers(machine, prompts[:1], [GREEDY], 1)
    with speaking(machine, Evens(CONFIG.vocab_size)):
        rows, _ = answers(machine, prompts, [GREEDY, even], 1 + DRAFTS)
    beside, held = tokens_of(rows)
    assert beside == tokens_of(alone)[0]
    assert len(held) == 7 and held[6] == BROKEN and all(token % 2 == 0 for token in held[:6])


def test_a_decode_machine_without_drafts_refuses_rows_of_several_tokens():
    machine = open_machine(Role.DECODE, HALVES, jax.devices()[6:], pp=2)
    with pytest.raises(AssertionError, match="no program draws so many"):
        machine.run(decode_plan(0, 0, (0,), 12, widths=(2,)))
