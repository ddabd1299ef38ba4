"""Bytes of a page, as it is and as shards hold it."""

import pytest

from jdisagg.core.layout.kv_layout import DTYPE_BYTES, KVLayout
from jdisagg.core.model_config import Latent, ModelConfig


@pytest.mark.parametrize(
    ("heads", "tp", "places"), [(8, 1, 8), (8, 4, 8), (3, 2, 4), (3, 4, 4), (3, 6, 6), (3, 8, 8), (8, 3, 9)]
)
def test_heads_that_are_padding_or_held_twice_are_counted_where_memory_is_asked_for(heads: int, tp: int, places: int):
    layout = KVLayout(5, heads, 64, 16)
    assert layout.page_shape(tp) == (places // tp, 2, 16, 64)
    assert layout.held_page_bytes(tp) * heads == layout.bytes_per_page * places


def model(head_dim: int, **more) -> ModelConfig:
    return ModelConfig("llama", 97, 32, 64, num_layers=3, num_heads=4, num_kv_heads=4, head_dim=head_dim,
                       max_position=128, **more)  # fmt: skip


@pytest.mark.parametrize(("head_dim", "parts", "width"), [(64, 1, 128), (32, 1, 64), (80, 2, 80), (128, 2, 128)])
def test_k_and_v_that_fit_into_one_row_of_a_tpu_share_it(head_dim: int, parts: int, width: int):
    apart, tiled = (KVLayout.of(model(head_dim), 16, "bfloat16", tiled=each) for each in (False, True))
    assert (apart.parts, apart.head_dim) == (2, head_dim)
    assert (tiled.parts, tiled.head_dim) == (parts, width)
    assert tiled.bytes_per_page == apart.bytes_per_page
    if head_dim in (64, 128):
        assert tiled.held_page_bytes(2) == apart.held_page_bytes(2), "no number of a tile is padding"


def test_latents_stay_as_they_are_and_fill_whole_rows():
    config = model(576, latent=Latent(512, 1536, 128, 64, 128), rotary_dim=64)
    tiled = KVLayout.of(config, 16, "bfloat16", tiled=True)
    assert (tiled.parts, tiled.head_dim, tiled.layer_page_bytes(4)) == (1, 576, 16 * 640 * 2)


# As libtpu 0.0.42 allocates pools of such pages, in pages of the bare size.
@pytest.mark.parametrize(
    ("dtype", "page_size", "head_dim", "times"),
    [
        *[
            ("bfloat16", 16, 128, 1),
            ("bfloat16", 32, 80, 1.6),
            ("bfloat16", 12, 128, 4 / 3),
            ("bfloat16", 20, 128, 1.2),
        ],
        *[("bfloat16", 4, 128, 1), ("bfloat16", 2, 128, 1), ("bfloat16", 1, 128, 2), ("bfloat16", 6, 128, 4 / 3)],
        *[("int8", 16, 128, 1), ("int8", 8, 128, 1), ("int8", 2, 128, 2), ("int8", 1, 128, 4), ("int8", 4, 128, 1)],
        *[("float32", 1, 128, 1), ("float32", 2, 128, 1), ("float32", 16, 96, 4 / 3), ("float32", 16, 160, 1.6)],
    ],
)
def test_a_page_takes_whole_tiles_of_a_tpu(dtype: str, page_size: int, head_dim: int, times: float):
    layout = KVLayout(1, 2, head_dim, page_size, dtype, tiled=True)
    numbers = 2 * 2 * page_size * head_dim * DTYPE_BYTES[dtype]
    assert layout.layer_page_bytes(1) - layout.layer_scale_bytes(1) == pytest.approx(numbers * times)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_quantised_pages_have_four_bytes_more_a_row(dtype: str):
    layout = KVLayout(3, 8, 128, 64, dtype)
    assert layout.bytes_per_token == 3 * 8 * 2 * (128 + 4)
    assert layout.scales_shape(2) == (4, 128)
    assert layout.held_page_bytes(2) == layout.bytes_per_page
    assert KVLayout(3, 8, 128, 64, "bfloat16").bytes_per_page / layout.bytes_per_page == pytest.approx(1.94, abs=0.01)


# A row of scales is one of 128 lanes, and eight of them (fewer where there are fewer heads) are a tile.
@pytest.mark.parametrize(("heads", "page_size", "times"), [(8, 64, 1), (8, 16, 4), (2, 64, 1), (3, 64, 4 / 3)])
def test_scales_take_whole_tiles_of_a_tpu(heads: int, page_size: int, times: float):
    layout = KVLayout(1, heads, 128, page_size, "int8", tiled=True)
    assert layout.layer_scale_bytes(1) == pytest.approx(heads * 2 * page_size * 4 * times)
