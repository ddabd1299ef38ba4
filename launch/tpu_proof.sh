#!/usr/bin/env bash
# Everything that is to be measured on a TPU, in calls of under nine minutes: bash launch/tpu_proof.sh [FOLDER FOR THE JSON]
# The steps are those of gpu_proof.sh; what may be set: proof_steps.sh.
# Needs a jax that sees the TPU (pip install "jax[tpu]"); PYTHON names another interpreter than .venv's.
set -uo pipefail
proof=tpu_proof platform=tpu
source "$(dirname "${BASH_SOURCE[0]}")/proof_steps.sh"
