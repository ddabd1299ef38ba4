# Sourced by gpu_proof.sh and tpu_proof.sh, which set `proof` (a name) and `platform`: what is measured on an accelerator,
# step by step. A step that fails, or for which no time is left, is named at the end, and ends none of the others.
#
# STEPS picks some, as STEPS="kernels tokens". LIMIT_S is what a call may take (540); a step has STEP_S at most (300).
# SMALL=1 tries the mechanics on whatever devices there are, with tiny cases. ROUNDS and ONLY go to benchmarks.kernels.
# All of them take several calls: those that found no time are named, for the next one's STEPS. A step that is stopped
# keeps what it measured, and tune goes on in the next call where it was.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
out=${1:-benchmarks/results}
all_steps="tune kernels latents quantised drafts products"
all_steps+=" tokens tokens_verified tokens_int8_pages tokens_fp8_pages tokens_latents tokens_experts overlap"
all_steps+=" embedded smollm2 smollm2_int8_pages smollm2_fp8_pages smollm2_verified smollm2_forced"
all_steps+=" llama_8b llama_8b_int8 llama_8b_fp8 vllm"
steps=${STEPS:-$all_steps}
limit_s=${LIMIT_S:-540} step_s=${STEP_S:-300} small=${SMALL:-}
failed=()
for each in $steps; do
  if [[ " $all_steps " != *" $each "* ]]; then
    echo "$proof: there is no step $each; steps are $all_steps" >&2
    exit 2
  fi
done
mkdir -p "$out"
if [[ -z $small ]]; then unset JAX_PLATFORMS; fi

device=$("$python" -c 'import jax; d = jax.devices()[0]; print(d.platform, d.device_kind)') || {
  echo "$proof: jax finds no device with $python" >&2
  exit 2
}
if [[ -z $small && $device != "$platform "* ]]; then
  echo "$proof: jax sees no $platform with $python, but $device; SMALL=1 tries the mechanics on it" >&2
  exit 2
fi
device=${device#* }
name=$(tr ' A-Z' '_a-z' <<<"$device")
rates=$out/kernels_$name.json
echo "== $device"

wanted() { [[ " $steps " == *" $1 "* ]]; }
run() { # NAME COMMAND...: says what runs and how long it took
  local step=$1 began=$SECONDS left=$((limit_s - SECONDS)) code=0
  shift
  if ((left < 1)); then
    failed+=("$step (no time left of $limit_s s: STEPS=\"$step\" runs it alone)")
    return
  fi
  echo "== $step: $*"
  timeout --kill-after=10 $((left < step_s ? left : step_s)) "$@" || code=$?
  if ((code == 124 || code == 137)); then
    failed+=("$step (stopped after $((SECONDS - began)) s)")
  elif ((code)); then
    failed+=("$step (exit code $code)")
  fi
  echo "== $step took $((SECONDS - began)) s"
}

one_device=prefill:tp1@0,decode:tp1@0
served() { # NAME OUTPUT_NAME ARGUMENTS...: a stack as a user launches it, against what its device could do
  local step=$1 to=$out/end_to_end_$2_$name.json
  shift 2
  if [[ ! -s $rates ]]; then
    failed+=("$step (needs $rates, which the step kernels writes)")
    return
  fi
  run "$step" "$python" -m benchmarks.end_to_end --mesh=$one_device --rates="$rates" --output="$to" "$@"
}

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
large=(--context=2048 --chunk=4096 --streams=64)
usual_launch=dtype=bfloat16
usual=(--context=512 --chunk=1024 --streams=32)
within_s=$((step_s < limit_s ? step_s : limit_s))
within_s=$((within_s * 4 / 5)) # after which a step of many cases begins none, so that it ends by itself
tuned=(--missing --limit_s="$within_s") measured=(--rounds="${ROUNDS:-10}" --only="${ONLY:-}" --limit_s="$within_s")
alike=() latent_model=tests/fixtures/conformance/deepseek3 expert_model=tests/fixtures/conformance/qwen3_moe
letters=tokenizer=tests/fixtures/conformance/llama3 # theirs have none of their own
small_model=smollm2 large_model=$models/llama_3_8b
if [[ $small ]]; then # tiny editions of the same commands
  usual_launch=platform=cpu
  tiny=(--context=16 --chunk=32 --streams=2 --output_tokens=8 --repeats=1)
  tuned=(--platform=cpu --out="$out/tuned.py" --limit_s="$within_s") alike=(--model=tests/fixtures/conformance/llama3 --prompts=2 --tokens=8)
  measured=(--suite=tiny --rounds=1 --no_peers --only=paged_attention) linked=(--links=25 --chunks=1 --rounds=1)
  small_model=tests/fixtures/conformance/llama3 large_model=$small_model
  usual=("${tiny[@]}") large=("${tiny[@]}") random=platform=cpu
fi

if wanted tune; then run tune "$python" -m pallas_kernels.tune "${tuned[@]}"; fi
if wanted kernels; then run kernels "$python" -m benchmarks.kernels "${measured[@]}" --output="$rates"; fi
more_kernels() { # SUITE ONLY_OF_TINY: what an accelerator is to do beside the rates of the step kernels
  local cases=("${measured[@]}" --suite="$1")
  if [[ $small ]]; then cases=(--suite=tiny --rounds=1 --no_peers --only="$2"); fi
  if wanted "$1"; then run "$1" "$python" -m benchmarks.kernels "${cases[@]}" --output="$out/kernels_$1_$name.json"; fi
}
more_kernels latents latents
more_kernels quantised 'attention .*(int8|fp8) pages'
more_kernels drafts 'rows each'
more_kernels products product

same() { # NAME ARGUMENTS...: tokens of the device are those of the CPU
  local step=$1
  shift
  if wanted "$step"; then
    run "$step" "$python" -m benchmarks.same_tokens "${alike[@]}" "$@" --output="$out/same_${step}_$name.json"
  fi
}
same tokens
same tokens_verified --launch=speculative=ngram:3
same tokens_int8_pages --launch=kv_dtype=int8
same tokens_fp8_pages --launch=kv_dtype=fp8
same tokens_latents --model="$latent_model" --launch="$letters"
same tokens_experts --model="$expert_model" --launch="$letters"
if wanted overlap; then
  run overlap "$python" -m benchmarks.transfer --mesh=$one_device "${linked[@]}" --output="$out/transfer_$name.json"
fi
if wanted embedded; then served embedded embedded "${usual[@]}" --launch="$usual_launch"; fi
small_served() { # NAME MORE_OF_LAUNCH ARGUMENTS...: the small model with something more
  local step=$1 launch=$usual_launch$2
  shift 2
  if wanted "$step"; then served "$step" "$step" --model="$small_model" "${usual[@]}" --launch="$launch" "$@"; fi
}
small_served smollm2 ""
small_served smollm2_int8_pages ,kv_dtype=int8
small_served smollm2_fp8_pages ,kv_dtype=fp8
small_served smollm2_verified ,speculative=ngram:3
# A grammar that mostly says what comes next: chunks of forced tokens, drafts of them, and some that are drawn.
small_served smollm2_forced ,speculative=grammar:3 --ask='{"guided_regex": "([a-z]{3} is one, two, three, four; ){9,99}"}'
if wanted llama_8b; then
  served llama_8b llama_3_8b --model="$large_model" "${large[@]}" --launch="$random"
fi
if wanted llama_8b_int8; then
  served llama_8b_int8 llama_3_8b_int8 --model="$large_model" "${large[@]}" --launch="$random,weight_dtype=int8"
fi
if wanted llama_8b_fp8; then
  served llama_8b_fp8 llama_3_8b_fp8 --model="$large_model" "${large[@]}" --launch="$random,weight_dtype=fp8"
fi
if wanted vllm; then
  if [[ ${VLLM_PYTHON:-} ]]; then
    run vllm "$python" -m benchmarks.peers.compare --models="${VLLM_MODELS:?folders of models, with commas}" \
      --vllm_python="$VLLM_PYTHON" --peers=default --meshes=$one_device --rounds=1 --output="$out/peers_$name.json"
  else
    echo "== vllm: not run, VLLM_PYTHON names no interpreter of an environment with vLLM"
  fi
fi

if [[ -z $small ]]; then "$python" -m benchmarks.kernels_table; fi
if ((${#failed[@]})); then
  printf '== failed: %s\n' "${failed[@]}" >&2
  exit 1
fi
