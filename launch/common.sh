# Functions for launch/setup.sh, launch/install_gpu.sh and tools/gpu_packages.sh. Before sourcing this file, they set `root`, `venv`, and
# `program`, and define `print_dependencies`, which prints everything that an installation depends on.
stamp="$venv/.megatron-rl-installed"

fail() {
  echo "megatron-rl $program: $1" >&2
  exit 2
}

is_installed() {
  [ -x "$venv/bin/python" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(print_dependencies)" ]
}

# is_usable_python PYTHON: succeed if it is 3.11 or 3.12 with the modules that make a virtual environment.
is_usable_python() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit((3, 11) > sys.version_info[:2] or sys.version_info[:2] > (3, 12))' >/dev/null 2>&1
}

# find_python HOW_TO_INSTALL CANDIDATE...: print $PYTHON if it is set, else the first usable candidate.
find_python() {
  local how_to_install=$1 candidate
  shift
  for candidate in ${PYTHON:+"$PYTHON"} "$@"; do
    if is_usable_python "$candidate"; then
      echo "$candidate"
      return
    fi
    [ "$candidate" != "${PYTHON:-}" ] || fail "PYTHON = '$PYTHON': is not Python 3.11 or 3.12 with the venv module"
  done
  fail "no Python 3.11 or 3.12 with the venv module on PATH; install one ($how_to_install) or set PYTHON"
}

# Succeed if the virtual environment was made in this folder, according to its pyvenv.cfg.
was_made_here() {
  case "$(sed -n 's/^command = //p' "$venv/pyvenv.cfg" 2>/dev/null)" in *" $venv") ;; *) return 1 ;; esac
}

# check_disk MB FIX: fail if less disk space is free, including the space of an earlier installation.
check_disk() {
  local need=$1 free used=0
  free=$(df -Pm "$root" | awk 'NR == 2 { print $4 }')
  if [ -d "$venv" ]; then used=$(du -sm "$venv" | cut -f1); fi
  [ "$((free + used))" -ge "$need" ] || fail "only $free MB free at $root: an installation needs $((need - used)) MB$2"
}

# lock SCRIPT: let concurrent installations wait for each other, at most an hour. Any process that can read SCRIPT can hold the lock.
lock() {
  local seconds=${MEGATRON_RL_LOCK_SECONDS:-3600}
  exec 9<"$1"
  flock --nonblock 9 && return
  echo "megatron-rl $program: waiting until another installation releases $1" >&2
  flock --timeout "$seconds" 9 || fail "another process has held $1 for $seconds s; end it (fuser -v $1 names it) and run this script again"
}

pip() {
  "$venv/bin/python" -m pip --disable-pip-version-check "$@" || fail "pip failed (see its message above); run this script again to continue"
}
