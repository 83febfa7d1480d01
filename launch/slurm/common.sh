# Functions for colocated.sbatch and disaggregated.sbatch, which set `root` to the repository before sourcing this file.

fail() {
  echo "megatron-rl slurm: $1" >&2
  exit 2
}

# check_number NAME VALUE LOW HIGH: fail unless VALUE is a whole number within the bounds.
check_number() {
  [[ $2 =~ ^[0-9]{1,9}$ ]] && [ "$2" -ge "$3" ] && [ "$2" -le "$4" ] || fail "$1 = '$2': must be a whole number from $3 to $4"
}

# prepare CONFIG ...: check the arguments and set `python`, `logs`, `restarts`, and MASTER_PORT.
prepare() {
  [ -n "${SLURM_JOB_ID:-}" ] || fail "this is not a SLURM job; start it with sbatch"
  [ $# -ge 1 ] || fail "CONFIG is missing: sbatch SCRIPT CONFIG.toml [--section.key=value ...]"
  [ -n "${SLURM_NTASKS_PER_NODE:-}" ] || fail "--ntasks-per-node is missing: the ranks on a node"
  [ -f "$1" ] || fail "CONFIG = '$1': no such file in $PWD; give a TOML file such as configs/quickstart.toml"
  restarts=${RESTARTS:-3}
  check_number RESTARTS "$restarts" 0 1000
  MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))} # differs between jobs on the same node
  check_number MASTER_PORT "$MASTER_PORT" 1024 65535
  python=${PYTHON:-$root/.venv-gpu/bin/python}
  [ -n "${PYTHON:-}" ] || [ -x "$python" ] || python="$root/.venv/bin/python"
  [ -x "$python" ] || fail "PYTHON = '$python': cannot be run; install with launch/install_gpu.sh or launch/setup.sh, or set PYTHON"
  logs=${LOGS:-$PWD/runs/slurm}/$SLURM_JOB_ID
  mkdir -p "$logs" || fail "LOGS = '${logs%/*}': cannot be written; name a folder that all nodes can access"
  export MASTER_PORT
}

# print_address NODE: print the address at which other nodes reach it.
print_address() {
  local node_address
  node_address=$(scontrol --oneliner show node "$1" | sed -n 's/.* NodeAddr=\([^ ]*\) .*/\1/p')
  [ -n "$node_address" ] || fail "scontrol shows no address for node '$1'"
  echo "$node_address"
}

# place_engines NODE...: spread rollout.engines evenly over these nodes. Engines on rank 0's node are its child processes and listen on
# loopback. Rank 0 starts the engines on other nodes as job steps.
place_engines() {
  local node host hosts=() launchers=""
  for node; do
    host=127.0.0.1
    if [ "$node" != "${rank_nodes[0]}" ]; then
      host=$(print_address "$node")
      launchers+="srun --overlap --nodelist=$node --nodes=1 --ntasks=1 --input=none --cpu-bind=none"
    fi
    launchers+=$'\n'
    hosts+=("\"$host\"")
  done
  settings+=("--rollout.hosts=[$(IFS=,; echo "${hosts[*]}")]")
  export MEGATRON_RL_ENGINE_LAUNCHER=${launchers%$'\n'}
}

# run_ranks CONFIG ARGUMENT...: run `megatron-rl train` with one task per rank on `rank_nodes`, each with its own log file, and the
# overrides in `settings`. Forward SLURM's warning signal to the ranks. Set `code` to their exit code.
run_ranks() {
  local config=$1
  shift
  MASTER_ADDR=$(print_address "${rank_nodes[0]}")
  MEGATRON_RL_LAUNCH_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n') # the ranks prove with it that they belong together
  export MASTER_ADDR MEGATRON_RL_LAUNCH_SECRET
  settings+=(--checkpoint.resume=auto)
  if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then # the default transport works on one host only
    settings+=(--sync.transport="$transport" "--sync.host=$MASTER_ADDR")
  fi
  echo "megatron-rl slurm: job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), ranks on ${rank_nodes[*]}, logs in $logs"
  local ranks=$((${#rank_nodes[@]} * SLURM_NTASKS_PER_NODE))
  # --wait: the ranks stop together, but rank 0 still writes a report. --cpu-bind: engines are children of rank 0 and need more cores.
  srun --nodelist="$(IFS=,; echo "${rank_nodes[*]}")" --nodes="${#rank_nodes[@]}" --ntasks="$ranks" --input=none \
    --output="${logs//%/%%}/rank_%5t.log" --open-mode=append --kill-on-bad-exit=0 --wait=60 --cpu-bind=none \
    bash -c 'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE
      exec "$@"' rank \
    "$python" -m megatron_rl train "$config" "${settings[@]}" "$@" &
  wait_for $!
}

# wait_for PID: wait for srun despite signals. Set `code`, and `ended` if SLURM ends the job.
wait_for() {
  local srun=$1 signalled
  ended=""
  trap 'signalled=1; kill -USR1 "$srun" || true' USR1 # time is almost up (--signal): srun forwards the signal to its tasks
  trap 'signalled=1; ended=1' TERM                    # canceled, requeued, or preempted: SLURM signals the tasks itself
  while
    signalled=""
    code=0
    wait "$srun" || code=$?
    [ -n "$signalled" ]
  do :; done
  trap - USR1 TERM
}

# finish: end the job, or requeue it if the run can continue.
finish() {
  [ "$code" -ne 0 ] || { echo "megatron-rl slurm: done"; exit 0; }
  [ -z "$ended" ] || { echo "megatron-rl slurm: ended by SLURM, exit code $code"; exit "$code"; }
  case $code in
    143) requeue "stopped by a signal" ;;
    2) print_last_lines ;;
    *)
      echo "$code" >>"$logs/broken"
      print_last_lines
      if [ "$(wc -l <"$logs/broken")" -le "$restarts" ]; then requeue "broken with exit code $code"; fi
      echo "megatron-rl slurm: broken $(wc -l <"$logs/broken") times; RESTARTS = $restarts" >&2
      ;;
  esac
  exit "$code"
}

print_last_lines() {
  tail -n 3 "$logs/rank_00000.log" >&2 || true
}

# requeue REASON: start the job again and exit.
requeue() {
  echo "megatron-rl slurm: $1; starting the job again"
  scontrol requeue "$SLURM_JOB_ID" || fail "scontrol requeue failed; submit the job again to continue"
  exit "$code"
}
