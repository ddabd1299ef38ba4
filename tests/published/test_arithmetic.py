"""Figures that others published and that follow from arithmetic alone: no queue, no fit, no data."""

from pathlib import Path

import pytest

from jdisagg.sim.arithmetic import least_reuse_bytes_per_s, model, number_bytes, pool_prices, transfer_s
from jdisagg.sim.hardware import model_of
from tests.fixtures.published_configs import PUBLISHED
from tests.published.gates import absolute, between, hold, hold_all, relative
from tests.published.mooncake import MOONCAKE_70B

GIGA = 1e9
LLAMA_70B = model("llama3-70b")


@pytest.mark.parametrize(("flops", "published"), [(8 * 312e12, 6.0), (8 * 989e12, 19.0)], ids=["8xA800", "8xH800"])
def test_a7_least_bandwidth_for_reuse_is_mooncakes(flops: float, published: float, request: pytest.FixtureRequest):
    ours = least_reuse_bytes_per_s(MOONCAKE_70B, 8192, flops) / GIGA
    devices = request.node.callspec.id
    hold(relative(f"A7 least bandwidth for reuse, {devices}, GB/s (Mooncake, equation 2)", published, ours, 0.04))


def test_a8_a_prefix_of_95_percent_saves_what_mooncake_says():
    whole, rest = (MOONCAKE_70B.prefill_flops(131072, cached) for cached in (0.0, 0.95 * 131072))
    hold(absolute("A8 prefill saved by a 95 % prefix at 128k, % (Mooncake)", 92.0, 100 * (1 - rest / whole), 1.5))


@pytest.mark.parametrize(
    ("gbit_per_s", "published_s"), [(24, 1.55), (40, 0.93), (80, 0.47), (100, 0.38), (160, 0.24), (400, 0.10)]
)
def test_a9_transfer_times_are_those_of_mooncakes_figure_13(gbit_per_s: float, published_s: float):
    """15,325 tokens is the mean input of that figure's workload (the paper's synthetic one)."""
    ours = transfer_s(LLAMA_70B.kv_bytes(15_325), gbit_per_s * GIGA / 8)
    hold(relative(f"A9 KV transfer at {gbit_per_s} Gbit/s, s (Mooncake, figure 13b)", published_s, ours, 0.10))


def test_a10_a_70b_models_128k_prompt_is_40_gib():
    assert LLAMA_70B.kv_bytes(1) == 327_680
    assert LLAMA_70B.kv_bytes(131_072) == 42_949_672_960
    hold(
        absolute("A10 KV of 128k tokens of LLaMA3-70B, GiB (Mooncake)", 40.0, LLAMA_70B.kv_bytes(131_072) / 2**30, 0.0)
    )


def test_a11_distserves_example_is_in_binary_units():
    size = model("opt-66b").kv_bytes(512) / 2**30
    of = "A11 OPT-66B, 512 tokens (DistServe)"
    hold_all(
        [
            relative(f"{of}: KV, GiB", 1.13, size, 0.01),
            relative(f"{of}: at 10 requests/s, GiB/s", 11.3, 10 * size, 0.01),
            relative(f"{of}: at 10 requests/s, Gibit/s", 90.0, 80 * size, 0.01),
        ]
    )


def test_a12_splitwises_machine_counts_follow_from_power_and_price():
    by_power, by_price = int(40 * 44 / 24.8), int(40 * 4.76 / 2.21)
    hold_all(
        [
            absolute("A12 A100 machines for the power of 40 H100 machines (Splitwise)", 70, by_power, 0),
            absolute("A12 A100 machines for the price of 40 H100 machines (Splitwise)", 86, by_price, 0),
        ]
    )


def test_a13_deepseeks_day_adds_up():
    """608e9 input and 168e9 output tokens in a day; 73.7 k and 14.8 k tokens/s a node of 8 H800 at 2 USD an hour."""
    prefill_nodes, decode_nodes = 608e9 / 86400 / 73.7e3, 168e9 / 86400 / 14.8e3
    node_usd_per_s = 8 * 2.0 / 3600
    revenue = 342e3 * 0.14 + 266e3 * 0.55 + 168e3 * 2.19
    prices = pool_prices(
        prefill_nodes * node_usd_per_s, decode_nodes * node_usd_per_s, 342e9 / 86400, 266e9 / 86400, 168e9 / 86400
    )
    of = "A13 DeepSeek's day"
    hold_all(
        [
            relative(f"{of}: nodes", 226.75, prefill_nodes + decode_nodes, 1e-3),
            relative(f"{of}: cost, USD", 87_072, 226.75 * node_usd_per_s * 86400, 1e-5),
            relative(f"{of}: revenue, USD", 562_027, revenue, 5e-4),
        ]
    )
    assert prices.input_tokens == pytest.approx(0.0603, rel=1e-3)
    assert prices.uncached_input_tokens == pytest.approx(0.1378, rel=1e-3)
    assert prices.output_tokens == pytest.approx(0.3001, rel=1e-3)


def test_splitwises_second_token_waits_for_its_kv_as_published():
    """BLOOM-176B, the median prompt of Azure's code trace, 8 x 200 Gbit/s; a step takes 49 ms, such a prompt 410 ms."""
    wait_s = transfer_s(model("bloom-176b").kv_bytes(1469), 8 * 200 * GIGA / 8)
    of = "Splitwise, KV after the prompt, BLOOM-176B at 8 x 200 Gbit/s"
    hold_all(
        [
            relative(f"{of}: second token, + %", 64.0, 100 * wait_s / 49e-3, 0.10),
            relative(f"{of}: of the prompt's time, %", 7.0, 100 * wait_s / 410e-3, 0.10, "published: under 7"),
        ]
    )


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
    assert model(name).kv_bytes(tokens, number_bytes(dtype)) == size_bytes


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_with_experts_have_as_many_weights_and_active_ones_as_are_published(name: str, tmp_path: Path):
    """Half a digit below what was published, where that was rounded up, to one above, where it was cut off."""
    published = PUBLISHED[name]
    config = model_of(str(published.folder(tmp_path / name)))
    active = config.num_active_params() - (0 if published.active_embedding else config.embedding_params)
    for what, said, ours in (
        ("weights", published.weights, config.num_params()),
        ("active for a token", published.active, active),
    ):
        digit = 1.0 if isinstance(said, int) else 0.1
        hold(between(f"{name}: {what}, billions", said, ours / 1e9, said - digit / 2, said + digit))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_token_leaves_as_many_numbers_in_each_layer_as_the_attention_keeps(name: str, tmp_path: Path):
    published = PUBLISHED[name]
    layers = published.config["num_hidden_layers"]
    assert model_of(str(published.folder(tmp_path))).kv_bytes(1, 2) == layers * published.kv_numbers * 2


def test_the_model_that_is_known_by_name_counts_as_its_folder_does(tmp_path: Path):
    named, read = model("deepseek-v3"), model_of(str(PUBLISHED["deepseek-v3"].folder(tmp_path)))
    for tokens in (1, 64, 4096):
        assert named.read_params(tokens, 8) == read.read_params(tokens, 8)
    assert (named.num_params(), named.num_active_params()) == (read.num_params(), read.num_active_params())
    assert named.prefill_flops(8192) == read.prefill_flops(8192)


def test_an_mha_formula_for_a_gqa_model_is_wrong_by_its_group():
    """80 x 2 x 64 x 128 x 128,000 x 2 bytes is 335.5 GB; with the model's 8 KV heads it is 41.9 GB."""
    assert 8 * LLAMA_70B.kv_bytes(128_000) == 80 * 2 * 64 * 128 * 128_000 * 2
    assert LLAMA_70B.kv_bytes(128_000) / GIGA == pytest.approx(41.9, abs=0.05)


def test_64_mib_take_under_a_millisecond_only_from_537_gbit_per_s():
    size = model("llama3-8b").kv_bytes(512)
    assert transfer_s(size, 100 * GIGA / 8) == pytest.approx(5.4e-3, rel=0.01)
    assert size / 1e-3 * 8 / GIGA == pytest.approx(537, rel=0.01)
