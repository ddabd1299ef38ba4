"""Figures that others published and that follow from arithmetic alone: no queue, no fit, no data."""

import pytest

from jdisagg.sim.arithmetic import MOONCAKE_70B, least_reuse_bytes_per_s, model, pool_prices, transfer_s

GIGA = 1e9
LLAMA_70B = model("llama3-70b")


@pytest.mark.parametrize(("flops", "published"), [(8 * 312e12, 6.0), (8 * 989e12, 19.0)], ids=["8xA800", "8xH800"])
def test_a7_least_bandwidth_for_reuse_is_mooncakes(flops: float, published: float):
    assert least_reuse_bytes_per_s(MOONCAKE_70B, 8192, flops) / GIGA == pytest.approx(published, rel=0.04)


def test_a8_a_prefix_of_95_percent_saves_what_mooncake_says():
    whole, rest = (MOONCAKE_70B.prefill_flops(131072, cached) for cached in (0.0, 0.95 * 131072))
    assert 100 * (1 - rest / whole) == pytest.approx(92.0, abs=1.5)


@pytest.mark.parametrize(
    ("gbit_per_s", "published_s"), [(24, 1.55), (40, 0.93), (80, 0.47), (100, 0.38), (160, 0.24), (400, 0.10)]
)
def test_a9_transfer_times_are_those_of_mooncakes_figure_13(gbit_per_s: float, published_s: float):
    """15,325 tokens is the mean input of that figure's workload (the paper's synthetic one)."""
    size = LLAMA_70B.kv_bytes(15_325)
    assert transfer_s(size, gbit_per_s * GIGA / 8) == pytest.approx(published_s, rel=0.10)


def test_a10_a_70b_models_128k_prompt_is_40_gib():
    assert LLAMA_70B.kv_bytes(1) == 327_680
    assert LLAMA_70B.kv_bytes(131_072) == 40 * 2**30 == 42_949_672_960


def test_a11_distserves_example_is_in_binary_units():
    size = model("opt-66b").kv_bytes(512)
    assert size / 2**30 == pytest.approx(1.13, rel=0.01)
    assert 10 * size / 2**30 == pytest.approx(11.3, rel=0.01)
    assert 10 * size * 8 / 2**30 == pytest.approx(90.0, rel=0.01)


def test_a12_splitwises_machine_counts_follow_from_power_and_price():
    assert int(40 * 44 / 24.8) == 70 and int(40 * 4.76 / 2.21) == 86


def test_a13_deepseeks_day_adds_up():
    """608e9 input and 168e9 output tokens in a day; 73.7 k and 14.8 k tokens/s a node of 8 H800 at 2 USD an hour."""
    prefill_nodes, decode_nodes = 608e9 / 86400 / 73.7e3, 168e9 / 86400 / 14.8e3
    assert prefill_nodes + decode_nodes == pytest.approx(226.75, rel=1e-3)
    node_usd_per_s = 8 * 2.0 / 3600
    assert 226.75 * node_usd_per_s * 86400 == pytest.approx(87_072, abs=0.5)
    revenue = 342e3 * 0.14 + 266e3 * 0.55 + 168e3 * 2.19
    assert revenue == pytest.approx(562_027, rel=5e-4)
    prices = pool_prices(
        prefill_nodes * node_usd_per_s, decode_nodes * node_usd_per_s, 342e9 / 86400, 266e9 / 86400, 168e9 / 86400
    )
    assert prices.input_tokens == pytest.approx(0.0603, rel=1e-3)
    assert prices.uncached_input_tokens == pytest.approx(0.1378, rel=1e-3)
    assert prices.output_tokens == pytest.approx(0.3001, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "tokens", "dtype", "size_bytes"),
    [
        ("llama3-8b", 512, "bfloat16", 64 * 2**20),
        ("llama3-70b", 32_768, "bfloat16", 10 * 2**30),
        ("llama3-70b", 8_192, "int8", 1.25 * 2**30),
        ("llama3-70b", 4_000, "bfloat16", 1_310_720_000),
        ("bloom-176b", 1, "bfloat16", 4_014_080),
        ("deepseek-v3", 1, "bfloat16", 70_272),
    ],
)
def test_sizes_that_are_often_quoted_wrongly_are_right(name: str, tokens: int, dtype: str, size_bytes: float):
    assert model(name).kv_bytes(tokens, dtype) == size_bytes


def test_an_mha_formula_for_a_gqa_model_is_wrong_by_its_group():
    """80 x 2 x 64 x 128 x 128,000 x 2 bytes is 335.5 GB; with the model's 8 KV heads it is 41.9 GB."""
    assert 8 * LLAMA_70B.kv_bytes(128_000) == 80 * 2 * 64 * 128 * 128_000 * 2
    assert LLAMA_70B.kv_bytes(128_000) / GIGA == pytest.approx(41.9, abs=0.05)


def test_64_mib_take_under_a_millisecond_only_from_537_gbit_per_s():
    size = model("llama3-8b").kv_bytes(512)
    assert transfer_s(size, 100 * GIGA / 8) == pytest.approx(5.4e-3, rel=0.01)
    assert size / 1e-3 * 8 / GIGA == pytest.approx(537, rel=0.01)
