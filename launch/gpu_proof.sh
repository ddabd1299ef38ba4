#!/usr/bin/env bash
# Everything that is to be measured on a GPU, in calls of under nine minutes: bash launch/gpu_proof.sh [FOLDER FOR THE JSON]
# Tunes the kernels, races them against their floors and peers, holds tokens to those of the CPU, tells what of a transfer
# is hidden, and launches the embedded model, SmolLM2 and a Llama-3-8B of random weights (bf16, fp8), prefill and decode on
# one device: a decode step against its floor, prefill's MFU, recompiles. What may be set: proof_steps.sh.
# Needs a jax that sees the GPU (pip install "jax[cuda13]"); PYTHON names another interpreter than .venv's.
set -uo pipefail
proof=gpu_proof platform=gpu
source "$(dirname "${BASH_SOURCE[0]}")/proof_steps.sh"
