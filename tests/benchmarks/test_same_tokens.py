"""What counts as the same, of a device beside the CPU."""

from dataclasses import replace

import pytest

from benchmarks.same_tokens import Said, alike, compared

THEIRS = Said("cpu", [[1, 2, 3, 4], [5, 6]], [[-1.0, -2.0], [-0.5]])


@pytest.mark.parametrize(("one", "other", "count"), [((1, 2), (1, 2), 2), ((1, 9, 3), (1, 2, 3), 1), ((7,), (1, 2), 0)])
def test_tokens_count_up_to_the_first_that_differs(one, other, count):
    assert alike(one, other) == count


def test_a_device_that_says_the_same_holds():
    found = compared(replace(THEIRS, device="gpu"), THEIRS, "float32")
    assert (found.device, found.same_tokens, found.mean_nats, found.holds) == ("gpu", 1, 0, True)


def test_another_token_breaks_f32_and_not_bf16_which_is_held_to_its_bound():
    ours = replace(THEIRS, tokens=[[1, 2, 9, 4], [5, 6]])
    assert compared(ours, THEIRS, "float32").same_tokens == pytest.approx(4 / 6)
    assert not compared(ours, THEIRS, "float32").holds
    assert compared(ours, THEIRS, "bfloat16").holds
    assert not compared(replace(ours, logprobs=[[-1.0, -2.3], [-0.5]]), THEIRS, "bfloat16").holds


def test_quantised_pages_are_held_to_bf16_s_bound_in_f32_too():
    ours = replace(THEIRS, tokens=[[1, 2, 9, 4], [5, 6]], logprobs=[[-1.0, -2.1], [-0.5]])
    assert compared(ours, THEIRS, "float32", quantised=True).holds
    assert not compared(replace(ours, logprobs=[[-1.0, -2.3], [-0.5]]), THEIRS, "float32", quantised=True).holds
