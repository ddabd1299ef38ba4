#!/usr/bin/env bash
# Everything that is to be measured on a GPU, in one call: bash launch/gpu_proof.sh [FOLDER FOR THE JSON]
# Tunes the kernels, races them against their floors and peers, then launches the embedded model and a Llama-3-8B of
# random bf16 weights, prefill and decode on one device, and prints a decode step against its floor and prefill's MFU.
# Needs a jax that sees the GPU (pip install "jax[cuda13]"); PYTHON names another interpreter than .venv's.
# STEPS picks some, as STEPS="kernels embedded"; ROUNDS and ONLY go to benchmarks.kernels. A step that fails is named at
# the end, and the others run all the same.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
out=${1:-benchmarks/results}
steps=${STEPS:-tune kernels embedded llama_8b}
failed=()
mkdir -p "$out"
unset JAX_PLATFORMS

device=$("$python" -c 'import jax; d = jax.devices()[0]; assert d.platform == "gpu", d; print(d.device_kind)') || {
  echo "gpu_proof: jax sees no GPU with $python" >&2
  exit 2
}
name=$(tr ' A-Z' '_a-z' <<<"$device")
rates=$out/kernels_$name.json
echo "== $device"

wanted() { [[ " $steps " == *" $1 "* ]]; }
run() { # NAME COMMAND...: says what runs and how long it took
  local step=$1 began=$SECONDS
  shift
  echo "== $step: $*"
  "$@" || failed+=("$step")
  echo "== $step took $((SECONDS - began)) s"
}

if wanted tune; then run tune "$python" -m pallas_kernels.tune; fi
if wanted kernels; then
  run kernels "$python" -m benchmarks.kernels --rounds="${ROUNDS:-10}" --only="${ONLY:-}" --output="$rates"
fi

one_device=prefill:tp1@0,decode:tp1@0
if wanted embedded; then
  run embedded "$python" -m benchmarks.end_to_end --mesh=$one_device --rates="$rates" --launch=dtype=bfloat16 \
    --context=512 --chunk=1024 --streams=32 --output="$out/end_to_end_embedded_$name.json"
fi
if wanted llama_8b; then
  models=$(mktemp -d)
  trap 'rm -rf "$models"' EXIT
  mkdir "$models/llama_3_8b"
  cat >"$models/llama_3_8b/config.json" <<'JSON'
{
  "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
  "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
  "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
  "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": false
}
JSON
  random=load_format=random,tokenizer=jdisagg/embedded,dtype=bfloat16,hbm_fraction=${HBM_FRACTION:-0.7}
  run llama_8b "$python" -m benchmarks.end_to_end --model="$models/llama_3_8b" --mesh=$one_device --rates="$rates" \
    --launch="$random" --context=2048 --chunk=4096 --streams=64 --output="$out/end_to_end_llama_3_8b_$name.json"
fi

"$python" -m benchmarks.kernels_table
if ((${#failed[@]})); then
  echo "== failed: ${failed[*]}" >&2
  exit 1
fi
