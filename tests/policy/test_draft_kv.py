"""A draft's KV is sent where reading it again would take longer."""

from dataclasses import replace

import pytest

from jdisagg.core.hardware import CHIPS, Chip
from jdisagg.core.layout.kv_layout import KVLayout
from jdisagg.policy.draft_kv import LINK_BYTES_PER_S, REACHED, REPEATED, DraftPrice, price_of
from jdisagg.sim.hardware import model_of

DRAFT = model_of("llama3-8b")
PAGES = KVLayout.of(DRAFT, 16, "bfloat16")


def test_what_is_cheaper_is_done_and_equal_prices_send_nothing():
    assert DraftPrice(send_s=1.0, reread_s=1.1).ships
    assert not DraftPrice(send_s=1.0, reread_s=1.0).ships


def test_the_price_is_bytes_over_the_link_against_the_flops_of_what_prefixes_repeat():
    chip = CHIPS["h100"]
    found = price_of(DRAFT, PAGES, chip, prefixes=True, always=True)
    assert found.send_s == pytest.approx(PAGES.bytes_per_token / LINK_BYTES_PER_S)
    assert found.reread_s == pytest.approx(REPEATED * DRAFT.prefill_flops(1) / (REACHED * chip.flops_per_s))


def test_nothing_is_sent_where_prefixes_are_not_found_again():
    assert not price_of(DRAFT, PAGES, None, prefixes=False, always=True).ships


@pytest.mark.parametrize("chip", [CHIPS["h100"], None])
def test_nothing_is_sent_where_guesses_may_never_be_taken(chip: Chip | None):
    assert price_of(DRAFT, PAGES, chip, prefixes=True, always=True).ships
    assert not price_of(DRAFT, PAGES, chip, prefixes=True, always=False).ships


def test_a_draft_with_few_kv_heads_is_sent_and_one_with_many_is_read_again():
    """Bytes grow with KV heads, FLOPs hardly."""
    many = replace(DRAFT, num_kv_heads=DRAFT.num_heads)
    assert price_of(DRAFT, PAGES, CHIPS["h100"], prefixes=True, always=True).ships
    assert not price_of(many, KVLayout.of(many, 16, "bfloat16"), CHIPS["h100"], prefixes=True, always=True).ships


def test_a_cpu_multiplies_so_slowly_that_it_sends():
    many = replace(DRAFT, num_kv_heads=DRAFT.num_heads)
    assert price_of(many, KVLayout.of(many, 16), None, prefixes=True, always=True).ships
