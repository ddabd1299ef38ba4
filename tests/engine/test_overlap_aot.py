"""Collectives of compiled programs stay hidden behind products: layers of Llama 3 70B on eight devices not here.

By the schedule that the compiler wrote, with products and links at the rates that steps are expected to take.
"""

import pytest

from jdisagg.core.hardware import Joined, Work
from jdisagg.core.schedule import waited
from jdisagg.core.worker_config import Role
from jdisagg.engine.compile_check import CheckedProgram
from jdisagg.sim.expected import multiplying, sending, start_s
from jdisagg.sim.hardware import hardware
from tests.engine.chips import checked_kinds, few_layers

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_kept_programs")]
CUBE, SWITCH = Joined(3, 3), Joined()


def compiled(target: str, role: Role) -> CheckedProgram:
    """Four layers, which a TPU's program goes round; a chunk of 2,048 tokens or a step of 16 rows."""
    table = few_layers("70B", role, target, 8, stages=1, layers=4, num_pages=1024, chunk_tokens=2048)
    kind = "decode" if role is Role.DECODE else "prefill"
    (checked,) = checked_kinds(table, [each for each in table.steps() if each.kind == kind][:1], kind)
    return checked


def seconds(target: str, checked: CheckedProgram, between: Joined) -> tuple[float, float, float]:
    """(of products, of collectives, of those that are exposed), in one step."""
    chip, worked = hardware(target.partition(":")[0]), list[float]()

    def work_s(work: Work) -> float:
        worked.append(multiplying(work, chip, "bfloat16"))
        return worked[-1]

    def collective_s(one) -> float:
        return start_s(chip, between) + sending(chip, one.sent([0] * 8), between)

    found = waited(checked.facts.schedule, work_s, collective_s, checked.declared.loops)
    return sum(worked), found.total_s, found.exposed_s


@pytest.mark.parametrize(("target", "between", "share"), [("v5p:2x2x2", CUBE, 0.2), ("h100:8", SWITCH, 0.3)])
def test_more_than_half_of_a_prefill_chunks_sums_are_hidden_and_a_stated_share_of_it_exposed(
    target: str, between: Joined, share: float
):
    worked_s, total_s, exposed_s = seconds(target, compiled(target, Role.PREFILL), between)
    print(f"{target}: products {worked_s * 1e6:.0f} us, collectives {total_s * 1e6:.0f}, exposed {exposed_s * 1e6:.0f}")
    assert exposed_s < 0.5 * total_s and exposed_s < share * worked_s


def test_of_a_worker_on_half_a_slice_a_fifth_of_a_chunks_sums_is_hidden_at_the_least():
    """The sparse cores send nothing for it, and the rest is one sum of four, fused with the product beside it."""
    _, total_s, exposed_s = seconds("v5p:2x2x4", compiled("v5p:2x2x4", Role.PREFILL), CUBE)
    assert 0.6 * total_s < exposed_s < 0.8 * total_s


def test_most_of_a_decode_steps_sums_are_hidden_on_tpus_behind_the_other_blocks_products():
    """The logits' gather, in blocks beside the next block's product, is a third of these."""
    worked_s, total_s, exposed_s = seconds("v5p:2x2x2", compiled("v5p:2x2x2", Role.DECODE), CUBE)
    print(f"v5p: products {worked_s * 1e6:.0f} us, collectives {total_s * 1e6:.0f}, exposed {exposed_s * 1e6:.0f}")
    assert exposed_s < 0.4 * total_s and exposed_s < 0.13 * worked_s


def test_a_decode_steps_sums_are_exposed_on_gpus_and_a_stated_share_of_it():
    """They take as long to start as to send: in blocks of columns they would start twice as often. The logits' gather
    goes in two blocks, one beside the other's product."""
    worked_s, total_s, exposed_s = seconds("h100:8", compiled("h100:8", Role.DECODE), SWITCH)
    print(f"h100: products {worked_s * 1e6:.0f} us, collectives {total_s * 1e6:.0f}, exposed {exposed_s * 1e6:.0f}")
    assert exposed_s < 0.9 * total_s and exposed_s < 0.42 * worked_s
