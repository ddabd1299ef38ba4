"""Rows that feed what their grammars force as one chunk draw the tokens that rows of one token would have drawn."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdisagg.core.request import BROKEN
from jdisagg.core.steps import History, PrefillChunks
from jdisagg.core.worker_config import Role
from jdisagg.engine.decode import ENABLED, MASKED, POSITION, STOPPED, TOKEN, advanced
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.engine.sampling import SamplingRows, TokenCounters, counted, penalised
from jdisagg.engine.spec.forced import AHEAD, FED, SLOT, USED, counted_forced, pays, penalised_behind, taken, widened
from jdisagg.engine.spec.grammar_masks import GrammarMasks
from tests.engine.answers import answers, speaking
from tests.engine.evens import BY_FOURS, Fours
from tests.engine.stacks import CHUNK, CONFIG, GREEDY, WIDEST, open_machine, prefill_chunk, tokens_of

MOST, SLOTS = 5, 3
told_of, stepped = jax.jit(taken), jax.jit(advanced)


@cache
def forcing_machine(pp: int) -> MeshExecutor:
    size = CONFIG.num_layers // pp
    layers = [range(start, start + size) for start in range(0, CONFIG.num_layers, size)]
    mixed = {"short_prompt_tokens": CHUNK, "mixed_steps": True} if pp == 1 else {}
    machine = open_machine(Role.DECODE, layers, jax.devices()[8 - pp :], pp=pp, forced_tokens=MOST, **mixed)
    machine.warm()
    return machine


@pytest.mark.parametrize("pp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_tokens_and_log_probabilities_of_one_chunk_are_those_of_one_token_a_step(pp: int):
    """Of rows that are penalised, seeded and alone in having a grammar; more is forced than a step has rows for."""
    prompts = [(5, 6, 7, 5, 6, 7, 5, 6), tuple(range(20)), (1, 2) * 8, (9, 3, 4), (8,) * 3]
    held = replace(GREEDY, grammar="fours", synchronous=True)
    sampling = [
        *(held, replace(held, temperature=0.8, seed=7, logprobs=2), replace(GREEDY, logprobs=1)),
        *(replace(held, presence_penalty=0.4, logprobs=3), replace(held, frequency_penalty=0.3, temperature=1.2)),
    ]
    machine = forcing_machine(pp)
    with speaking(machine, Fours(CONFIG.vocab_size)):
        (plain, many), (chunked, few) = (answers(machine, prompts, sampling, most) for most in (1, 1 + MOST))
    assert tokens_of(chunked) == tokens_of(plain) and few < 0.8 * many
    for row in (1, 2, 3):
        for mine, other in zip(chunked[row], plain[row], strict=True):
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-5)
            assert [token for token, _ in mine.top] == [token for token, _ in other.top]
    assert machine.recompiles() == 0


def test_rows_that_are_greedy_draw_by_a_program_of_their_own_and_the_same():
    prompts, held = [(5, 6, 7), (9, 3, 4)], replace(GREEDY, grammar="fours", synchronous=True)
    machine = forcing_machine(1)
    with speaking(machine, Fours(CONFIG.vocab_size)):
        (plain, many), (chunked, few) = (answers(machine, prompts, [held, GREEDY], most) for most in (1, 1 + MOST))
    assert tokens_of(chunked) == tokens_of(plain) and few < many
    assert machine.recompiles() == 0


def test_beside_chunks_of_prompts_they_go_as_one_chunk_as_well():
    prompts, held = [(5, 6, 7), (9, 3, 4)], replace(GREEDY, grammar="fours", synchronous=True)
    coming, machine = tuple(range(7, 60)), forcing_machine(1)
    chunks = PrefillChunks((prefill_chunk(20, coming, 0, len(coming), GREEDY),), CHUNK, WIDEST)
    with speaking(machine, Fours(CONFIG.vocab_size)):
        alone, _ = answers(machine, prompts, [held, GREEDY], 1 + MOST)
        (plain, many), (chunked, few) = (answers(machine, prompts, [held, GREEDY], most, chunks) for most in (1, 6))
    assert tokens_of(chunked) == tokens_of(plain) == tokens_of(alone) and few < many
    assert machine.recompiles() == 0


@settings(max_examples=40)
@given(st.data())
def test_what_is_told_of_a_run_is_what_steps_of_one_token_would_tell(data: st.DataObject):
    """Up to a stop, or a row whose logits are no numbers; and the state behind it is theirs."""
    tokens = st.lists(st.integers(0, 4), min_size=MOST + 1, max_size=MOST + 1)
    drawn = [[BROKEN if each == 4 else each for each in data.draw(tokens)] for _ in range(SLOTS)]
    lengths = data.draw(st.lists(st.integers(0, 2), min_size=SLOTS, max_size=SLOTS).filter(lambda each: sum(each) <= 5))
    rows, state = SamplingRows(SLOTS), np.array([[9, 8, 7], [4, 0, 2], [0, 0, 0], [1, 1, 0]], np.int32)
    rows.set(1, replace(GREEDY, stop_token_ids=(2,)), 0)
    metadata, behind, at = rows.on(jax.device_put), np.zeros((4, MOST), np.int32), 0
    for slot, length in enumerate(lengths):
        for ahead in range(1, length + 1):
            behind[[SLOT, AHEAD, FED, USED], at], at = (slot, ahead, max(drawn[slot][ahead - 1], 0), 1), at + 1
    fed = [drawn[slot][0] for slot in range(SLOTS)] + [drawn[slot][ahead] for slot, ahead, _, _ in behind.T]

    held = jnp.asarray(state), jnp.asarray(behind)
    wide = np.asarray(widened(*held))
    assert wide[POSITION, :SLOTS].tolist() == state[POSITION].tolist()
    assert wide[POSITION, SLOTS:].tolist() == [state[POSITION, slot] + ahead for slot, ahead, _, _ in behind.T]
    assert wide[ENABLED, SLOTS:].tolist() == [state[ENABLED, slot] * used for slot, _, _, used in behind.T]
    after, told = (np.asarray(each) for each in told_of(*held, jnp.asarray(fed), metadata))

    one = jnp.asarray(state)
    for ahead in range(MOST + 1):
        on = [int(state[ENABLED, slot] and ahead <= lengths[slot]) for slot in range(SLOTS)]
        tokens = jnp.asarray([each[ahead] for each in drawn], jnp.int32)
        one, expected = stepped(one.at[ENABLED].set(jnp.asarray(on)), tokens, metadata)
        for slot in range(SLOTS):
            place = [slot, *(SLOTS + at for at in range(MOST) if behind[USED, at] and behind[SLOT, at] == slot)]
            if ahead < len(place):
                assert told[place[ahead]] == expected[slot]
    assert after[[TOKEN, POSITION, STOPPED]].tolist() == np.asarray(one)[[TOKEN, POSITION, STOPPED]].tolist()
    assert after[ENABLED].tolist() == state[ENABLED].tolist()
    assert all(told[SLOTS + at] == MASKED for at in range(MOST) if not behind[USED, at])


def test_penalties_look_at_what_a_row_is_fed_behind_its_last_token_as_at_what_was_drawn():
    numbers, rows, vocab = np.random.default_rng(5), SamplingRows(SLOTS), 6
    for row, penalty in enumerate((0.5, 0.0, 1.5)):
        rows.set(row, replace(GREEDY, presence_penalty=penalty, frequency_penalty=0.25, repetition_penalty=1.25), 0)
    behind = jnp.array([[0, 0, 2, 2, 2], [1, 2, 1, 2, 3], [4, 4, 1, 0, 1], [1, 1, 1, 1, 0]], jnp.int32)
    logits = jnp.asarray(numbers.normal(size=(SLOTS + MOST, vocab)), jnp.float32)
    seen = numbers.integers(0, 2, (2, SLOTS, vocab))
    metadata, counts = (
        rows.on(jax.device_put),
        TokenCounters(jnp.asarray(seen[0] == 1), jnp.asarray(seen[1], jnp.int32)),
    )
    found = penalised_behind(logits, behind, metadata, counts)
    for column in range(3):  # as many are fed behind the first token, one after another
        places = [0, 1, 2] if column == 0 else [SLOTS + column - 1, 1, SLOTS + 1 + column]
        expected = penalised(logits[jnp.array(places)], metadata, counts)
        for slot in (0, 1, 2) if column == 0 else (0, 2):
            assert found[places[slot]].tolist() == expected[slot].tolist(), (slot, column)
        fed = [(4, -1, 1), (4, -1, 0)][column] if column < 2 else (-1,) * 3
        told = [*fed, *(-1 for _ in range(MOST))]
        after = counted_forced(counts, behind, jnp.array(told))
        counts = counted(counts, jnp.array(fed))
        assert after.output.tolist() == counts.output.tolist()


def test_rows_share_what_a_step_has_room_for_and_masks_follow_what_each_is_fed():
    masks = GrammarMasks(Fours(CONFIG.vocab_size), 4, CONFIG.vocab_size, jax.device_put)
    held = replace(GREEDY, grammar="fours", synchronous=True)
    for row, output in ((0, (20,)), (2, (8, 9)), (3, (4,))):
        masks.begin(row, held, History((1, 2), output))
    assert masks.make_forced({0: 2, 2: 4, 3: 4}, 4) == {0: (21,), 2: (10, 11), 3: (5,)}, "by width, then what is left"
    bits = np.asarray(masks.allowed_in([0, 1, 2], {0: range(4, 5), 2: range(5, 7)}, 8))
    only = [[token for token in range(97) if row[token // 32] >> (token % 32) & 1] for row in bits.tolist()]
    assert only[0] == [21] and only[4] == [22] and only[2] == [10] and only[5] == [11]
    assert all(len(only[row]) == 97 for row in (1, 3, 6, 7)), "no grammar, not in the step, a free token, of nobody"
    assert masks.make_forced({0: 1, 2: 1}, 4) == {} and BY_FOURS == 4


def test_a_wide_step_is_taken_where_it_is_dearer_by_no_more_than_the_steps_that_it_spares():
    assert pays(1, active=1, slots=8, most=8) and pays(8, active=8, slots=8, most=8)
    assert not pays(0, active=1, slots=8, most=8) and not pays(7, active=8, slots=8, most=8)
    assert pays(1, active=32, slots=256, most=8), "rows beyond many are few"
