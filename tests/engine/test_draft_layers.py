"""A model that guesses: its guesses are as good as it is, wherever a sequence comes from, and tokens stay the same."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from jdisagg.core.model_config import ModelConfig
from jdisagg.core.request import Attempt, RequestId, SamplingParams
from jdisagg.core.steps import Admission, DecodeRows, History, PrefillChunk, PrefillChunks
from jdisagg.core.tiers import PageMove, Tier
from jdisagg.core.worker_config import Role
from jdisagg.engine.layer_group import Chunks
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.engine.prefill import pack
from jdisagg.engine.spec import draft_layers
from jdisagg.engine.spec.draft_layers import LATELY, DraftModel
from jdisagg.engine.spec.drafting import DraftingDecoder
from jdisagg.model.sources import RandomSource
from tests.engine.answers import answers as held_answers
from tests.engine.answers import speaking
from tests.engine.evens import NoFifths
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


def test_nothing_is_read_while_nothing_is_guessed_and_a_late_reader_is_as_right_as_an_early_one(
    monkeypatch: pytest.MonkeyPatch,
):
    """Prompts and what was drawn meanwhile are read before the first guess, once, as many as one step reads."""
    machine = guessing_machine(True)
    read = reads_of(machine, monkeypatch)
    plain, _ = answers(machine, SAMPLING, TOKENS)
    assert not read
    found, drawn = answers(machine, SAMPLING, 2 * LATELY)
    assert machine.draft is not None and machine.draft.primed_tokens == read[0]
    assert found == plain and drawn[:3] == [1 + DRAFTS] * 3 and set(drawn[4:]) == {1 + DRAFTS}
    assert len(read) == 2 and sum(read) <= sum(map(len, PROMPTS)) + 2 * LATELY * len(PROMPTS)
    assert machine.recompiles() == 0


@pytest.mark.slow
@pytest.mark.parametrize("pp", [1, 2])
def test_a_model_that_guesses_badly_changes_no_token(pp: int):
    machine = guessing_machine(False, pp)
    plain, _ = answers(machine, SAMPLING, TOKENS)
    found, drawn = answers(machine, SAMPLING, 0)
    assert found == plain and sum(drawn) < 2 * len(drawn) and machine.recompiles() == 0


def test_rows_with_a_grammar_are_guessed_for_as_well_and_what_it_refuses_is_cut_off():
    machine, held = guessing_machine(True), replace(GREEDY, grammar="no fifths", synchronous=True)
    sampling = [held, replace(held, temperature=0.9, seed=7, logprobs=2), GREEDY, replace(held, top_k=9, seed=3)]
    with speaking(machine, NoFifths(CONFIG.vocab_size)):
        (plain, many), (drafted, few) = (held_answers(machine, PROMPTS, sampling, most) for most in (1, 1 + DRAFTS))
    assert tokens_of(drafted) == tokens_of(plain) and few < 0.6 * many
    assert all(token % 5 for row in (0, 1, 3) for token in tokens_of(drafted)[row][1:])
    assert machine.recompiles() == 0


def test_a_machine_that_decodes_nothing_needs_no_guesses_unless_their_pages_are_kept():
    draft = DraftModel(SOURCE, CONFIG)
    assert open_machine(Role.PREFILL, [range(4)], jax.devices()[:1], draft=draft).draft is None
    assert open_machine(Role.PREFILL, [range(4)], jax.devices()[:1], draft=draft, draft_layers=4).draft is not None


def test_a_prompt_is_read_the_same_in_any_chunks(monkeypatch: pytest.MonkeyPatch):
    devices = jax.devices()[7:]
    tokens, pages = tuple(each * 5 % 97 for each in range(50)), tuple(range(1, 8))
    admission = Admission(0, RequestId("r"), tokens[-1], 49, pages, GREEDY, 1, History(tokens[:-1], tokens[-1:]))
    found = []
    for size in (10, 64):
        monkeypatch.setattr(draft_layers, "PRIMED", size)
        machine = open_machine(Role.DECODE, [range(4)], devices, draft=DraftModel(SOURCE, CONFIG), draft_tokens=DRAFTS)
        draft, decoder = machine.draft, machine.runner.decoder
        assert draft is not None and draft.primed_tokens == size and isinstance(decoder, DraftingDecoder)
        reading = decoder.guesses[0].reading
        assert reading is not None
        decoder.begin(rows(0, 1, admission))
        steps = 0
        while due := reading.due(rows(1 + steps, 1 + DRAFTS)):
            reading.read(due, decoder.guesses[0].history)
            steps += 1
            assert np.asarray(reading.fed)[0] == min(steps * size, 49), "no more than that between two steps"
        assert steps == -(-50 // size)
        found.append([np.asarray(pool[1:8]) for pool in draft.kv.pools])
    for parted, whole in zip(*found, strict=True):
        assert np.allclose(parted, whole, atol=1e-5) and np.abs(whole).max() > 0.1


def rows(step: int, width: int, *admitted: Admission) -> DecodeRows:
    plan = decode_plan(step, 0, (0,), 12, admitted, widths=(width,)).decode
    assert plan is not None
    return plan


# ------------------------------------------------------------------ pages that are kept


@cache
def keeping(kind: str) -> MeshExecutor:
    """A machine whose model guesses for itself and keeps the pages it does so from; a decode machine of two stages."""
    pp = 2 if kind == Role.DECODE else 1
    layers = [range(start, start + 4 // pp) for start in range(0, 4, 4 // pp)]
    devices = jax.devices()[8 - pp :] if kind == Role.DECODE else jax.devices()[:1]
    sizes: dict[str, Any] = {"draft_tokens": DRAFTS, "draft_layers": 4, "dram_pages": 4}
    machine = open_machine(Role(kind), layers, devices, pp=pp, draft=DraftModel(SOURCE, CONFIG), **sizes)
    machine.warm(peers=[keeping(Role.DECODE)] if kind == Role.PREFILL else [])
    return machine


def reads_of(machine: MeshExecutor, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each chunk that the model that guesses is going to read there."""
    assert machine.draft is not None
    found, read = list[int](), machine.draft.prefill

    def prefill(chunks: Chunks, x: jax.Array | None) -> jax.Array:
        found.append(int(chunks.spans[1, -1]))
        return read(chunks, x)

    monkeypatch.setattr(machine.draft, "prefill", prefill)
    return found


def drawn_by(machine: MeshExecutor, admitted: list[Admission], steps: int) -> list[int]:
    """Tokens of all rows in that many steps that guess."""
    found, active = list[int](), tuple(each.slot for each in admitted)
    for step in range(steps):
        widths = (1 + DRAFTS,) * len(active)
        plan = decode_plan(step, 0, active, 12, admitted if step == 0 else (), widths=widths)
        found += [len(each or ()) for _, each in machine.run(plan).read().decode]
    return found


def test_pages_that_were_handed_over_are_not_read_again(monkeypatch: pytest.MonkeyPatch):
    source, machine = keeping(Role.PREFILL), keeping(Role.DECODE)
    read, again = reads_of(source, monkeypatch), reads_of(machine, monkeypatch)
    prompts = [tuple(range(70)), *PROMPTS]
    sampling = [GREEDY, *SAMPLING]
    firsts = first_tokens(run_prefill(source, prefill_plans(prompts, sampling)))
    ship_all(source, machine, [len(prompt) for prompt in prompts])
    admitted = Steps(machine).admissions(prompts, firsts, sampling)
    assert set(drawn_by(machine, admitted, 5)) == {1 + DRAFTS}
    assert sum(read) == sum(map(len, prompts)) and not again
    assert not source.recompiles() and not machine.recompiles()


def test_what_a_source_without_a_draft_does_not_bring_is_read_from_the_tokens(monkeypatch: pytest.MonkeyPatch):
    """And what lay in these pages before is not taken for it."""
    machine, source = keeping(Role.DECODE), prefill_machine(1)
    source.warm(peers=[machine])
    again, prompt = reads_of(machine, monkeypatch), tuple(range(90, 20, -1))
    (first,) = first_tokens(run_prefill(source, prefill_plans([prompt], [GREEDY])))
    ship_all(source, machine, [len(prompt)])
    drawn = drawn_by(machine, Steps(machine).admissions([prompt], [first], [GREEDY]), 6)
    assert drawn[-3:] == [1 + DRAFTS] * 3
    assert len(prompt) - 2 * LATELY <= sum(again) <= len(prompt), "some of it was read by the first guesses"
    assert not machine.recompiles()


def test_pages_that_came_back_from_below_are_not_read_again(monkeypatch: pytest.MonkeyPatch):
    """To other places; what was written for nothing yet is none of it."""
    source, machine = keeping(Role.PREFILL), keeping(Role.DECODE)
    prompt = tuple(each * 7 % 97 for each in range(32))
    (first,) = first_tokens(run_prefill(source, prefill_plans([prompt], [GREEDY])))
    ship_all(source, machine, [len(prompt)])
    (admission,) = Steps(machine).admissions([prompt], [first], [GREEDY])
    records, good = machine.pack_pages(admission.pages[:4]).read()
    elsewhere = tuple(range(200, 212))
    owner = Attempt(RequestId("r"), 0)
    move = PageMove(owner, Tier.DRAM, Tier.HBM, b"", destination_pages=elsewhere[:4])
    shipment = machine.land_pages(move, records, [good] * 4)
    shipment.wait()
    machine.insert(shipment)
    again = reads_of(machine, monkeypatch)
    assert good and set(drawn_by(machine, [replace(admission, pages=elsewhere)], 4)) == {1 + DRAFTS} and not again


def test_a_page_says_itself_how_far_it_was_written():
    machine = keeping(Role.DECODE)
    draft = machine.draft
    assert draft is not None
    tokens, pages = tuple(range(30)), (301, 302, 303, 304)
    admission = Admission(0, RequestId("r"), 5, 30, pages, GREEDY, 1, History(tokens))
    draft.wipe([(page, 0) for page in pages])
    assert int(draft.found(admission)) == 0
    chunk = PrefillChunk(RequestId("r"), tokens, 0, pages, last=False, sampling=GREEDY)
    draft.read(pack(PrefillChunks((chunk,), draft.primed_tokens, 12), machine.config))
    assert [int(draft.found(replace(admission, position=position))) for position in (30, 29, 8)] == [30, 29, 8]
    draft.wipe([(304, 3)])
    assert int(draft.found(admission)) == 27
    draft.wipe([(302, 0)])
    assert int(draft.found(admission)) == 8, "what lies behind what is not there counts nothing"
