"""A head that guesses: right wherever its keys and values come from, and tokens stay the same whatever it guesses."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import pytest

from jdisagg.core.request import SamplingParams
from jdisagg.core.worker_config import Role
from jdisagg.engine.mesh_executor import MeshExecutor
from tests.adapter_files import adapters_in
from tests.engine.heads import SHALLOW, ignorant_head, knowing_head
from tests.engine.stacks import (
    CONFIG,
    GREEDY,
    SOURCE,
    Steps,
    first_tokens,
    open_machine,
    prefill_plans,
    run_prefill,
    ship_all,
    tokens_of,
)
from tests.steps import decode_plan

DRAFTS, TOKENS = 3, 21
KNOWING = {"knowing": (), "knowing, near": (6, 6)}  # and how far layers look back
PROMPTS = [(5, 6, 7, 5, 9), tuple(range(20)), (1, 2) * 8, (9, 3, 4)]
SAMPLING = [GREEDY, replace(GREEDY, temperature=0.9, seed=7), GREEDY, replace(GREEDY, temperature=1.0, seed=2, top_k=9)]


@cache
def pair(kind: str, pp: int = 1, tp: int = 1, **sizes: Any) -> tuple[MeshExecutor, MeshExecutor]:
    """A prefill and a decode machine: of a model whose head is always right, or of one whose head knows nothing."""
    if kind in KNOWING:
        source, head = knowing_head(KNOWING[kind])
        config = replace(SHALLOW, layer_windows=KNOWING[kind])
    else:
        source, config = SOURCE, CONFIG
        head = ignorant_head((1, 3, *range(20, 60)) if kind == "some tokens" else None)
    size = config.num_layers // pp
    layers = [range(start, start + size) for start in range(0, config.num_layers, size)]
    of: dict[str, Any] = {"config": config, "source": source, "draft": head, **sizes}
    machines = (
        open_machine(Role.PREFILL, layers, jax.devices()[:tp], **of),
        open_machine(Role.DECODE, layers, jax.devices()[8 - pp * tp :], pp=pp, draft_tokens=DRAFTS, **of),
    )
    machines[1].warm()
    machines[0].warm(peers=[machines[1]])
    return machines


def answers(
    machines: tuple[MeshExecutor, MeshExecutor], sampling: list[SamplingParams], plain_steps: int
) -> tuple[list, list[int]]:
    """What each prompt draws: first so many steps of one token, then as many as may be; and the rows' tokens then."""
    source, machine = machines
    firsts = first_tokens(run_prefill(source, prefill_plans(PROMPTS, sampling)))
    ship_all(source, machine, [len(prompt) for prompt in PROMPTS])
    admitted = Steps(machine).admissions(PROMPTS, firsts, sampling)
    rows, drawn, step, active = [[first] for first in firsts], list[int](), 0, tuple(range(len(PROMPTS)))
    while active:
        wide = 1 if step < plain_steps else 1 + DRAFTS
        widths = tuple(min(wide, TOKENS - len(rows[slot])) for slot in active)
        plan = decode_plan(step, 0, active, 12, admitted if step == 0 else (), widths=widths)
        for slot, found in machine.run(plan).read().decode:
            assert found is not None
            rows[slot] += found
            drawn += [len(found)] if wide > 1 and widths[active.index(slot)] == wide else []
        step, active = step + 1, tuple(slot for slot in active if len(rows[slot]) < TOKENS)
    return tokens_of(rows), drawn


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("plain_steps", [0, 4])
def test_a_head_that_knows_is_right_after_a_handoff_at_any_temperature(plain_steps: int, pp: int):
    """All that it reads of the prompt was written where the prompt was computed, and came with the model's own KV."""
    machines = pair("knowing", pp)
    plain, _ = answers(machines, SAMPLING, TOKENS)
    found, drawn = answers(machines, SAMPLING, plain_steps)
    assert found == plain and drawn and set(drawn) == {1 + DRAFTS}
    assert not any(machine.recompiles() for machine in machines)


def test_a_head_with_a_window_looks_back_no_further():
    """It is right where its model has the same, and would be wrong of more."""
    machines = pair("knowing, near")
    plain, _ = answers(machines, SAMPLING, TOKENS)
    found, drawn = answers(machines, SAMPLING, 0)
    assert found == plain and drawn and set(drawn) == {1 + DRAFTS}
    assert found != answers(pair("knowing"), SAMPLING, TOKENS)[0], "the window is felt"


@pytest.mark.parametrize("kind", ["all tokens", "some tokens"])
def test_a_head_that_guesses_badly_changes_no_token(kind: str):
    machines = pair(kind)
    plain, _ = answers(machines, SAMPLING, TOKENS)
    found, drawn = answers(machines, SAMPLING, 0)
    assert found == plain and sum(drawn) < 2 * len(drawn)
    assert not any(machine.recompiles() for machine in machines)


@pytest.mark.parametrize(("tp", "kv_dtype"), [(2, "float32"), (1, "int8")])
def test_a_head_over_shards_or_quantised_pages_is_as_right(tp: int, kv_dtype: str):
    """Its layer is cut as the model's are, and its keys and values are quantised as theirs."""
    machines = pair("knowing", 1, tp, kv_dtype=kv_dtype)
    plain, _ = answers(machines, SAMPLING, TOKENS)
    found, drawn = answers(machines, SAMPLING, 2)
    assert found == plain and drawn and set(drawn) == {1 + DRAFTS}
    assert not any(machine.recompiles() for machine in machines)


def test_a_head_guesses_beside_adapters_and_changes_no_token(tmp_path: Path):
    """It knows the model alone: rows without an adapter are guessed right, whoever is beside them."""
    machines = pair("knowing", max_loras=2, max_lora_rank=4)
    one, other = adapters_in(tmp_path, SHALLOW, 2)
    pairs = zip(SAMPLING, (one, None, other, one), strict=True)
    adapted = [replace(row, adapter=each) for row, each in pairs]
    plain, _ = answers(machines, adapted, TOKENS)
    found, _ = answers(machines, adapted, 0)
    assert found == plain
    bare, drawn = answers(machines, SAMPLING, 0)
    assert set(drawn) == {1 + DRAFTS} and bare[1] == plain[1]
    assert all(bare[row] != plain[row] for row in (0, 2, 3)), "adapters change what is drawn"
    assert not any(machine.recompiles() for machine in machines)
