"""What is to run on an accelerator, without one: steps are picked, and what fails is named and ends nothing else."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Stands for the interpreter: its modules do nothing, or fail, or take long, and what measures kernels writes its file.
STUB = """#!/usr/bin/env bash
if [[ $1 == -c ]]; then echo "$DEVICE"; exit; fi
echo "ran $2 $*"
for word in "$@"; do case $word in --output=*) echo '{}' >"${word#--output=}" ;; esac; done
case " $SLOW " in *" $2 "*) sleep 30 ;; esac
case " $BROKEN " in *" $2 "*) exit 3 ;; esac
"""
MORE_TOKENS = "verified", "int8_pages", "fp8_pages", "latents", "experts"
PROOFS = ["gpu_proof", "tpu_proof"]


def proved(proof: str, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    stub = tmp_path / "python"
    stub.write_text(STUB)
    stub.chmod(0o755)
    device = "gpu NVIDIA H100" if proof == "gpu_proof" else "tpu TPU v5 lite"
    told = {**os.environ, "PYTHON": str(stub), "DEVICE": device, "SLOW": "", "BROKEN": "", **environment}
    command = ["bash", str(ROOT / "launch" / f"{proof}.sh"), str(tmp_path / "out")]
    return subprocess.run(command, env=told, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("proof", PROOFS)
def test_every_step_runs_and_what_fails_is_named_at_the_end(proof, tmp_path):
    done = proved(proof, tmp_path, BROKEN="benchmarks.same_tokens benchmarks.transfer")
    assert done.returncode == 1
    failed = ["tokens", *(f"tokens_{each}" for each in MORE_TOKENS), "overlap"]
    assert [line for line in done.stderr.splitlines() if line.startswith("== failed")] == [
        f"== failed: {step} (exit code 3)" for step in failed
    ]
    for module in ("pallas_kernels.tune", "benchmarks.kernels", "benchmarks.end_to_end", "benchmarks.kernels_table"):
        assert f"ran {module}" in done.stdout, module
    assert done.stdout.count("ran benchmarks.end_to_end") == 9 and "weight_dtype=fp8" in done.stdout
    for suite in ("latents", "quantised", "drafts", "products"):
        assert f"--suite={suite}" in done.stdout and list((tmp_path / "out").glob(f"kernels_{suite}_*.json")), suite
    ran = {
        module: [line for line in done.stdout.splitlines() if line.startswith(f"ran benchmarks.{module}")]
        for module in ("same_tokens", "end_to_end")
    }
    for each in ("speculative=ngram:3", "kv_dtype=int8", "kv_dtype=fp8"):
        assert [sum(each in line for line in lines) for lines in ran.values()] == [1, 1], each
    of_fixtures = [line for line in ran["same_tokens"] if "--model=tests/fixtures/conformance" in line]
    assert len(of_fixtures) == 2 and all("--launch=tokenizer=" in line for line in of_fixtures)
    assert sum("guided_regex" in line for line in ran["end_to_end"]) == 1
    assert "vllm: not run, VLLM_PYTHON names no interpreter" in done.stdout


@pytest.mark.parametrize("proof", PROOFS)
def test_steps_can_be_picked(proof, tmp_path):
    done = proved(proof, tmp_path, STEPS="kernels smollm2")
    assert done.returncode == 0, done.stderr
    assert "ran benchmarks.kernels" in done.stdout and "--model=smollm2" in done.stdout
    assert "ran pallas_kernels.tune" not in done.stdout and done.stdout.count("ran benchmarks.end_to_end") == 1


def test_a_step_that_there_is_not_is_refused_with_those_that_there_are(tmp_path):
    done = proved("gpu_proof", tmp_path, STEPS="kernels lunch")
    assert done.returncode == 2 and "there is no step lunch; steps are tune kernels latents" in done.stderr


def test_a_step_has_a_limit_and_what_no_time_is_left_for_is_named(tmp_path):
    done = proved("gpu_proof", tmp_path, STEPS="tune kernels embedded", SLOW="pallas_kernels.tune", LIMIT_S="2")
    assert done.returncode == 1
    assert "tune (stopped after" in done.stderr and "no time left of 2 s" in done.stderr


def test_served_models_need_the_rates_of_the_kernels_step(tmp_path):
    done = proved("gpu_proof", tmp_path, STEPS="embedded")
    assert done.returncode == 1 and "embedded (needs " in done.stderr and "which the step kernels writes" in done.stderr


@pytest.mark.parametrize(("proof", "platform"), [("gpu_proof", "gpu"), ("tpu_proof", "tpu")])
def test_another_device_is_refused_but_for_a_small_edition(proof, platform, tmp_path):
    refused = proved(proof, tmp_path, DEVICE="cpu cpu")
    assert refused.returncode == 2 and f"jax sees no {platform}" in refused.stderr and "SMALL=1" in refused.stderr
    small = proved(proof, tmp_path, DEVICE="cpu cpu", SMALL="1")
    assert small.returncode == 0, small.stderr
    assert "--suite=tiny" in small.stdout and "tests/fixtures/conformance/llama3" in small.stdout


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_small_edition_runs_for_real(tmp_path):
    told = {**os.environ, "SMALL": "1", "STEPS": "tune kernels", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = ["bash", str(ROOT / "launch" / "tpu_proof.sh"), str(tmp_path)]
    done = subprocess.run(command, env=told, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert list(tmp_path.glob("kernels_*.json"))
