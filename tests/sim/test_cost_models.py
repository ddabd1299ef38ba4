"""What plans cost: lines as published, a roofline whose parts are counted by hand, and pages of KV on the wire."""

import numpy as np
import pytest

from jdisagg.core.errors import ConfigError
from jdisagg.core.request import Attempt, RequestId, SamplingParams, WorkerId
from jdisagg.core.steps import DecodeRows, KVTransfer, PrefillChunk, PrefillChunks
from jdisagg.sim.arithmetic import model
from jdisagg.sim.cost_models import Model, Roofline, distserve_fit, distserve_kv_tokens
from jdisagg.sim.hardware import hardware

H100 = hardware("h100")


def prefill(*spans: tuple[int, int]) -> PrefillChunks:
    """A chunk of the tokens from start to stop of a sequence each."""
    chunks = tuple(
        PrefillChunk(RequestId(str(i)), (0,) * (stop - start), start, (), True, SamplingParams())
        for i, (start, stop) in enumerate(spans)
    )
    return PrefillChunks(chunks, 4096, 1)


def step(batch: int) -> DecodeRows:
    return DecodeRows(0, tuple(range(batch)), 1)


def part(tokens: int, layers: tuple[int, int] | None = None) -> KVTransfer:
    return KVTransfer(Attempt(RequestId("r"), 1), WorkerId("p"), WorkerId("d"), (), (), tokens, layers=layers)


def test_distserves_lines_give_its_milliseconds():
    fit = distserve_fit("opt-13b", 1)
    assert fit.prefill_s(prefill((0, 512))) == pytest.approx(
        18.1025e-3 + 0.101912e-3 * 512 + 7.1223e-9 * 512**2, rel=1e-4
    )
    assert fit.decode_s(step(64), 50_000) == pytest.approx(
        19.9347e-3 + 0.626936e-6 * 50_000 + 0.038507e-3 * 64, rel=1e-4
    )
    assert fit.decode_s(step(95), 50_000) == pytest.approx(7.16619e-3 + 0.5798e-6 * 50_000 + 0.158311e-3 * 95, rel=1e-4)


@pytest.mark.parametrize("cost", [distserve_fit("opt-66b", 4), Roofline(Model(model("llama3-8b")), H100)])
def test_a_prompt_in_chunks_costs_its_squares_once_and_each_plan_its_own_fixed_part(cost):
    whole, first, second = (cost.prefill_s(prefill(span)) for span in ((0, 4096), (0, 2048), (2048, 4096)))
    assert second > first, "the second half sees the first"
    nothing = cost.prefill_s(prefill((0, 0)))
    tail = first + second - whole
    assert 0 < tail <= nothing * 1.0001, "two plans pay one fixed part more, and nothing else"


@pytest.mark.parametrize("cost", [distserve_fit("opt-13b", 2), Roofline(Model(model("llama3-70b")), H100, 4)])
def test_decoding_slows_with_the_batch_and_with_the_context_alone(cost):
    assert cost.decode_s(step(64), 10_000) > cost.decode_s(step(1), 10_000)
    assert cost.decode_s(step(16), 100_000) > cost.decode_s(step(16), 10_000)


def test_a_lone_decode_step_reads_layers_and_head_once():
    """Llama-3-8B has 6.98 G weights in its layers and .53 G in its head."""
    cost = Roofline(Model(model("llama3-8b")), H100, host_s=0.0)
    layers, head = 32 * (4096 * 10240 + 3 * 4096 * 14336) * 2, 128256 * 4096 * 2
    assert cost.weight_bytes == layers + 2 * head
    assert cost.decode_s(step(1), 0) == pytest.approx((layers + head) / (H100.hbm_bytes_per_s * 0.83))


def test_a_long_prefill_is_bound_by_its_flops():
    cost = Roofline(Model(model("llama3-8b")), H100, host_s=0.0)
    linear, pairs = 32 * 26 * 4096 * 4096**2, 32 * 2 * 4096**2 * 4096
    head_s = 128256 * 4096 * 2 / (H100.hbm_bytes_per_s * 0.83)
    compute_s = linear / (H100.flops * 0.78) + pairs / (H100.flops * 0.67)
    assert cost.prefill_s(prefill((0, 4096))) == pytest.approx(compute_s + head_s)


def test_a_mixed_step_reads_the_weights_once_for_both():
    cost = Roofline(Model(model("llama3-8b")), H100)
    alone_s = cost.prefill_s(prefill((0, 64))) + cost.decode_s(step(8), 8_000)
    weights_s = (cost.weight_bytes - model("llama3-8b").head_params() * 2) / (H100.hbm_bytes_per_s * 0.83)
    assert alone_s - cost.mixed_s(prefill((0, 64)), step(8), 8_000) == pytest.approx(weights_s + cost.host_s)


def test_shards_pay_their_collectives():
    costs = [Roofline(Model(model("llama3-70b")), H100, tp) for tp in (4, 8)]
    alone = [cost.prefill_s(prefill((0, 2048))) for cost in costs]
    assert alone[0] / 2 < alone[1] < alone[0]


def test_a_part_weighs_its_own_tokens_and_layers():
    cost = distserve_fit("opt-13b", 1)
    assert cost.transfer_bytes(part(10)) == 10 * 2 * 40 * 40 * 128 * 2
    assert cost.transfer_bytes(part(10, (0, 10))) == cost.transfer_bytes(part(10)) / 4


def test_shards_that_do_not_divide_the_heads_pay_for_their_padding():
    """Eight KV heads on three shards are three each, on two four: a third more than an even share."""
    shape, tokens = Model(model("llama3-8b")), 1_000_000
    even, padded = (Roofline(shape, H100, tp) for tp in (2, 3))
    assert shape.kv_bytes(tokens, 3) * 8 == 3 * shape.kv_bytes(tokens)
    read_s = [each.decode_s(step(8), tokens) - each.decode_s(step(8), 0) for each in (even, padded)]
    assert read_s[1] / read_s[0] == pytest.approx(3 / 4)
    room = 3 * H100.hbm_bytes * 0.9 - padded.weight_bytes
    assert padded.kv_tokens() == pytest.approx(room / (9 * shape.kv_bytes(1) / 8), rel=1e-6)


def test_kv_room_is_what_weights_leave():
    assert distserve_kv_tokens("opt-66b", 2, 2) == 78_512
    roomy = Roofline(Model(model("llama3-8b")), H100)
    assert roomy.kv_tokens() == int((0.9 * H100.hbm_bytes - roomy.weight_bytes) // 131_072)
    with pytest.raises(ConfigError, match=r"llama3-70b.*1 x h100"):
        Roofline(Model(model("llama3-70b")), H100).kv_tokens()


V3 = Model(model("deepseek-v3"))
EXPERT = 3 * 7168 * 2048  # weights of one of DeepSeek-V3's 256 experts, of which a token is sent to 8


def test_a_step_reads_the_experts_that_its_batch_is_expected_to_hit():
    """58 of 61 layers have experts: one row reads 8 of them, two read 8 + 8 * 248/256, many rows read all."""
    cost = Roofline(V3, H100, 16, host_s=0.0)

    def experts_read(batch: int) -> float:
        read_s = cost._matrices_s(1, V3.config.num_layers * V3.config.read_params(batch, 16), 1)
        rest = V3.config.num_layers * (V3.config.read_params(1, 16)) - 58 * 8 * EXPERT / 16
        return (read_s * H100.hbm_bytes_per_s * H100.skinny / 2 - rest) / (58 * EXPERT / 16)

    assert [experts_read(batch) for batch in (1, 2)] == pytest.approx([8, 15.75])
    assert experts_read(4096) == pytest.approx(256)
    slower = cost.decode_s(step(2), 0) - cost.decode_s(step(1), 0)
    reduce_s = 2 * 61 * 7168 * 2 * 2 * 15 / 16 / (H100.link_bytes_per_s * H100.link)
    assert slower - reduce_s == pytest.approx(7.75 * 58 * EXPERT / 16 * 2 / (H100.hbm_bytes_per_s * H100.skinny))


def test_a_prompts_experts_cost_what_multiplies_for_each_token():
    cost, tokens = Roofline(V3, H100, host_s=0.0), 8192
    active = 58 * 9 * EXPERT + 3 * 3 * 7168 * 18432 + 58 * 7168 * 256 + 61 * 187_105_280
    pairs = 61 * 128 * 2 * (192 + 128) * tokens**2 / 2
    head_s = 129_280 * 7168 * 2 / (H100.hbm_bytes_per_s * H100.skinny)
    compute_s = 2 * active * tokens / (H100.flops * H100.gemm) + pairs / (H100.flops * H100.prefill_attention)
    assert cost.prefill_s(prefill((0, tokens))) == pytest.approx(compute_s + head_s, rel=1e-4)


@pytest.mark.parametrize(("tp", "bound"), [(1, "FLOPs"), (8, "bytes")])
def test_latents_are_read_at_their_bytes_or_at_the_flops_of_the_heads_that_share_them(tp: int, bound: str):
    """128 heads multiply 2 * (576 + 512) numbers with each row of 1,152 bytes; every shard reads all rows."""
    cost, tokens = Roofline(V3, H100, tp), 1_000_000
    read_s = cost.decode_s(step(8), tokens) - cost.decode_s(step(8), 0)
    bytes_s = 61 * 1152 * tokens / (H100.hbm_bytes_per_s * H100.decode_attention)
    flops_s = 61 * 128 // tp * 2 * (576 + 512) * tokens / (H100.flops * H100.prefill_attention)
    assert (
        read_s == pytest.approx({"FLOPs": flops_s, "bytes": bytes_s}[bound]) and read_s >= max(bytes_s, flops_s) * 0.99
    )
    assert cost.transfer_bytes(part(10)) == 10 * 61 * 1152, "shipped once, however many shards hold it"
    assert cost.steps_s(step(8), np.array([tokens]))[0] == cost.decode_s(step(8), tokens)


@pytest.mark.parametrize(
    ("ask", "there"),
    [
        (lambda: distserve_fit("opt-175b", 8), "opt-13b, opt-66b"),
        (lambda: distserve_fit("opt-13b", 8), "1, 2, 4"),
        (lambda: distserve_fit("opt-13b", 1, "orca"), "distserve, vllm"),
    ],
)
def test_what_was_not_published_is_refused_by_name(ask, there):
    with pytest.raises(ConfigError, match=there):
        ask()
