"""One arithmetic of a model, held against published figures and against itself cut in shards."""

from dataclasses import replace

import pytest

from jdisagg.core.layout.kv_layout import KVLayout
from jdisagg.core.model_config import Experts, ModelConfig
from jdisagg.sim.arithmetic import MODELS

LLAMA_3_70B = ModelConfig("llama", 128256, 8192, 28672, 80, 64, 8, 128, 8192)
MHA = replace(LLAMA_3_70B, num_kv_heads=64)
DEEPSEEK_V3 = MODELS["deepseek-v3"]


def test_the_weights_of_a_model_are_those_of_its_name():
    assert LLAMA_3_70B.num_params() == pytest.approx(70.55e9, rel=1e-3)
    assert replace(LLAMA_3_70B, tie_embeddings=True).num_params() == LLAMA_3_70B.num_params() - 128256 * 8192


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_shards_hold_a_layers_weights_once(tp: int):
    assert tp * LLAMA_3_70B.layer_params(tp) == LLAMA_3_70B.layer_params()
    assert tp * LLAMA_3_70B.layer_kv_size(tp) == LLAMA_3_70B.layer_kv_size()
    assert tp * LLAMA_3_70B.head_params(tp) == LLAMA_3_70B.head_params()


def test_more_shards_than_kv_heads_replicate_them_and_a_vocabulary_that_does_not_divide_is_whole():
    assert LLAMA_3_70B.layer_kv_size(16) == LLAMA_3_70B.layer_kv_size(8)
    assert 16 * LLAMA_3_70B.layer_params(16) - LLAMA_3_70B.layer_params() == 8192 * 2 * 8 * 128
    odd = replace(LLAMA_3_70B, vocab_size=128257)
    assert odd.head_params(8) == odd.head_params()


def test_padding_counts_as_weights_pages_and_work_of_each_shard():
    """Nine query and three KV heads on two shards: six and two each; 101 channels are 51 each."""
    nine = replace(LLAMA_3_70B, num_heads=9, num_kv_heads=3, intermediate_size=101)
    assert nine.layer_params(2) == 8192 * (2 * 6 * 128 + 2 * 2 * 128 + 3 * 51)
    assert nine.layer_kv_size(2) == 2 * 2 * 128 and nine.kv_bytes(7, 2, tp=2) == 80 * 7 * 2 * 2 * 2 * 128
    assert nine.attention_flops(10, 2) == 4 * 6 * 128 * 10
    assert nine.num_params(2) - nine.num_params() == 80 * (2 * nine.layer_params(2) - nine.layer_params())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_leaves_as_many_bytes_as_its_pages_give_it(dtype: str):
    layout = KVLayout(80, 8, 128, 16, dtype)
    assert LLAMA_3_70B.kv_bytes(1, {"float32": 4, "bfloat16": 2}[dtype]) == layout.bytes_per_token
    assert LLAMA_3_70B.kv_bytes(16, 2) == KVLayout(80, 8, 128, 16, "bfloat16").bytes_per_page


def test_a_prompts_flops_are_two_for_each_weight_and_four_for_each_pair():
    assert LLAMA_3_70B.prefill_flops(1) == 80 * (2 * LLAMA_3_70B.layer_params() + 4 * 64 * 128)
    whole, cached = LLAMA_3_70B.prefill_flops(1000), LLAMA_3_70B.prefill_flops(400)
    assert LLAMA_3_70B.prefill_flops(1000, cached=400) == whole - cached


def test_the_kind_of_attention_is_read_from_the_heads():
    assert [each.attention_kind for each in (LLAMA_3_70B, MHA, DEEPSEEK_V3)] == ["GQA", "MHA", "MLA"]


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_latent_is_held_whole_by_every_shard_and_its_bytes_are_those_of_its_pages(tp: int):
    layout = KVLayout.of(DEEPSEEK_V3, 64, "bfloat16")
    assert DEEPSEEK_V3.layer_kv_size(tp) == 512 + 64
    assert layout.bytes_per_token == 61 * 1152 == DEEPSEEK_V3.kv_bytes(1)
    assert layout.page_shape(tp) == (1, 1, 64, 576)
    assert layout.held_page_bytes(tp) == tp * layout.bytes_per_page


def test_latent_attention_counts_its_own_matrices_and_pairs():
    dense = replace(DEEPSEEK_V3, experts=None)
    queries, latents = 7168 * 1536 + 1536 * 128 * 192, 7168 * 576 + 512 * 128 * 256
    assert dense.layer_params() == queries + latents + 128 * 128 * 7168 + 3 * 7168 * 18432
    assert dense.attention_flops(10) == 10 * 128 * 2 * (192 + 128)
    assert dense.attention_flops(10, 8, decoding=True) == 10 * 16 * 2 * (576 + 512)
    assert LLAMA_3_70B.attention_flops(10, decoding=True) == LLAMA_3_70B.attention_flops(10)


MIXTRAL = ModelConfig("mixtral", 32000, 4096, 14336, 32, 32, 8, 128, 32768, experts=Experts(8, 2, 14336))
QWEN3_30B = ModelConfig("qwen3_moe", 151936, 2048, 6144, 48, 32, 4, 128, 40960, experts=Experts(128, 8, 768))
GPT_OSS_20B = ModelConfig("gpt_oss", 201088, 2880, 2880, 24, 64, 8, 64, 131072, experts=Experts(32, 4, 2880))


@pytest.mark.parametrize(
    ("config", "all_of_them", "active"),
    [(MIXTRAL, 46.70e9, 12.88e9), (QWEN3_30B, 30.53e9, 3.35e9), (GPT_OSS_20B, 20.91e9, 4.19e9)],
)
def test_models_with_experts_have_as_many_weights_and_active_ones_as_their_shapes_say(config, all_of_them, active):
    """gpt-oss' 3.61 B active ones leave its embedding out, 0.58 B."""
    assert config.num_params() == pytest.approx(all_of_them, rel=2e-3)
    assert config.num_active_params() == pytest.approx(active, rel=5e-3)


def test_a_step_reads_the_experts_that_its_tokens_are_expected_to_be_sent_to():
    expert = 3 * 4096 * 14336
    rest = MIXTRAL.active_params() - 2 * expert
    assert MIXTRAL.read_params(1) == pytest.approx(rest + 2 * expert), "one token is sent to two"
    assert MIXTRAL.read_params(2) == pytest.approx(rest + 8 * (1 - 0.75**2) * expert)
    assert MIXTRAL.read_params(10_000) == pytest.approx(MIXTRAL.layer_params())
    assert MIXTRAL.linear_flops(5) == 2 * 5 * MIXTRAL.active_params()
    tokens = range(1, 50)
    reads = [MIXTRAL.read_params(count) for count in tokens]
    assert reads == sorted(reads) and reads[-1] < MIXTRAL.layer_params()


def test_layers_without_experts_count_as_dense_ones():
    dense = replace(MIXTRAL, experts=None)
    mixed = replace(MIXTRAL, experts=Experts(8, 2, 14336, dense_layers=(0, 5)))
    sparse_layers, dense_layers = 30, 2
    assert mixed.layer_params(1, 5) == dense.layer_params() and mixed.layer_params(1, 1) == MIXTRAL.layer_params()
    layers = mixed.num_params() - 2 * mixed.embedding_params
    assert layers == dense_layers * dense.layer_params() + sparse_layers * MIXTRAL.layer_params()
    assert mixed.layer_kinds() == ((0, 2), (1, 30))
    assert mixed.layer_kinds(range(3, 6)) == ((5, 1), (3, 2)) and mixed.layer_kinds(range(1, 5)) == ((1, 4),)


def test_shards_hold_whole_experts_and_the_last_may_hold_none():
    experts = Experts(5, 2, 14336)
    odd, expert = replace(MIXTRAL, experts=experts), 3 * 4096 * 14336
    assert [experts.held(tp) for tp in (1, 2, 4, 8)] == [5, 3, 2, 1]
    assert 2 * odd.layer_params(2) - odd.layer_params() == expert + 4096 * 5, "one of zeros, and the router twice"
