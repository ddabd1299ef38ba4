"""Floors and shares of a launched stack, and the command on the embedded model."""

import json
import subprocess
import sys

import pytest

from benchmarks import end_to_end
from benchmarks.load import Burst, Sample
from jdisagg.core.model_config import ModelConfig

LLAMA_8B = ModelConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, max_position=8192)
RATES = end_to_end.Rates(4e12, 800e12, "bfloat16")


def test_a_decode_step_reads_weights_once_and_every_streams_kv():
    weights, kv = end_to_end.step_bytes(LLAMA_8B, "bfloat16", streams=64, context=2048)
    assert weights == pytest.approx(15.0e9, rel=0.01)  # 8.03 G parameters less the embedding's 0.53 G, two bytes each
    assert kv == 64 * 2048 * 131072


def test_what_is_stored_small_is_read_small():
    stored = end_to_end.Stored.of(["dtype=bfloat16", "weight_dtype=int8", "kv_dtype=fp8"])
    weights, kv = end_to_end.step_bytes(LLAMA_8B, "bfloat16", streams=64, context=2048, stored=stored)
    plain = end_to_end.step_bytes(LLAMA_8B, "bfloat16", streams=64, context=2048)
    assert (2 * weights, kv) == (plain[0], plain[1] * (128 + 4) // 256)


def test_prefill_costs_two_operations_a_weight_and_token_and_its_attention():
    body, attention = 2 * 6.98e9 * 4096, 4 * 32 * 4096 * 4096**2 / 2
    assert end_to_end.prefill_flops(LLAMA_8B, 4096) == pytest.approx(body + attention, rel=0.01)


def test_figures_are_of_the_median_and_count_steps_from_the_second_token_on():
    ledger = {"decode": 9_900_000_000, "prefill": 100_000_000}
    burst = Burst(64, 10.0, tuple(Sample(0.0, (0.5, 9.0), 9.0, 2000, 101, ledger) for _ in range(64)))
    decode = end_to_end.decoded(burst, LLAMA_8B, RATES, 2048.0)
    assert decode.step_ms.p50 == pytest.approx(100.0) and decode.output_tokens_per_s == pytest.approx(646.4)
    assert decode.share == pytest.approx(decode.floor_ms / 100.0)
    prefill = end_to_end.prefilled(burst, LLAMA_8B, RATES, 4096)
    assert prefill.mfu == pytest.approx(prefill.flops / 0.1 / 800e12)


def test_a_failed_request_is_no_measurement():
    with pytest.raises(ValueError, match="a request failed: 503"):
        end_to_end.prefilled(Burst(1, 1.0, (Sample(0.0, error="503"),)), LLAMA_8B, RATES, 8)


def test_rates_of_another_file_are_refused(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match="has no rates"):
        end_to_end.Rates.read(str(tmp_path / "x.json"))


@pytest.mark.slow
def test_two_workers_on_one_device_are_launched_and_measured(tmp_path):
    rates, output = tmp_path / "rates.json", tmp_path / "out.json"
    rates.write_text('{"rates": {"copy_bytes_per_s": 1e10, "matmul_flops_per_s": 1e11, "dtype": "float32"}}')
    arguments = ["--streams=2", "--context=40", "--chunk=64", "--output_tokens=8", "--repeats=1"]
    command = [sys.executable, "-m", "benchmarks.end_to_end", f"--rates={rates}", f"--output={output}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "decode step of 2 streams" in done.stdout and "MFU" in done.stdout
    record = json.loads(output.read_text())
    assert record["mesh"] == "prefill:tp1@0,decode:tp1@0" and record["decode"]["streams"] == 2
