"""Bytes of a page, as it is and as shards hold it."""

import pytest

from jdisagg.core.kv_layout import KVLayout


@pytest.mark.parametrize(
    ("heads", "tp", "places"), [(8, 1, 8), (8, 4, 8), (3, 2, 4), (3, 4, 4), (3, 6, 6), (3, 8, 8), (8, 3, 9)]
)
def test_heads_that_are_padding_or_held_twice_are_counted_where_memory_is_asked_for(heads: int, tp: int, places: int):
    layout = KVLayout(5, heads, 64, 16)
    assert layout.page_shape(tp) == (places // tp, 2, 16, 64)
    assert layout.held_page_bytes(tp) * heads == layout.bytes_per_page * places
