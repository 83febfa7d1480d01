#!/usr/bin/env bash
# Make .venv in the repository's root with pinned packages: torch's CPU build, Megatron-Core, SGLang, and this project (editable).
# A second call finds the stamp of a finished installation and returns at once; a half-finished one is taken up again. Needs no GPU.
#   PYTHON=/path/to/python3.11     use this interpreter (default: the first fit one on PATH)
#   MEGATRON_RL_MIN_DISK_MB=4000   disk that an installation asks for; .venv takes 2.1 GB of it, pip's cache and unpacking the rest
# Exit code 2 and one line where Python or the disk is unfit.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
venv="$root/.venv"
stamp="$venv/.megatron-rl-installed"

fail() {
  echo "megatron-rl setup: $1" >&2
  exit 2
}

# What an installation depends on: these files and the folder (a venv that was moved or copied belongs to its old folder).
wanted() {
  (cd "$root" && sha256sum launch/requirements-torch.txt launch/requirements.txt launch/setup.sh pyproject.toml && pwd -P)
}

is_done() {
  [ -x "$venv/bin/python" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(wanted)" ]
}

# 3.11 or 3.12, with the modules that make a virtual environment.
is_fit() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit((3, 11) > sys.version_info[:2] or sys.version_info[:2] > (3, 12))' >/dev/null 2>&1
}

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3 python; do
    if is_fit "$candidate"; then
      echo "$candidate"
      return
    fi
    [ "$candidate" != "${PYTHON:-}" ] || fail "PYTHON = '$PYTHON': is not Python 3.11 or 3.12 with the venv module"
  done
  fail "no Python 3.11 or 3.12 with the venv module on PATH; install one (Debian, Ubuntu: apt install python3.11 python3.11-venv) or set PYTHON"
}

check_disk() {
  local need=${MEGATRON_RL_MIN_DISK_MB:-4000} free used=0
  free=$(df -Pm "$root" | awk 'NR == 2 { print $4 }')
  if [ -d "$venv" ]; then used=$(du -sm "$venv" | cut -f1); fi # what an earlier installation holds need not be free again
  [ "$((free + used))" -ge "$need" ] || fail "only $free MB free at $root: an installation asks for $((need - used)) MB; free some, or move the clone"
}

# Was it made in this folder (its pyvenv.cfg says how), and does it run? Otherwise it is made anew.
is_usable_venv() {
  case "$(sed -n 's/^command = //p' "$venv/pyvenv.cfg" 2>/dev/null)" in *" $venv") ;; *) return 1 ;; esac
  is_fit "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1
}

is_done && exit 0

exec 9<"${BASH_SOURCE[0]}" # two installations at once wait for each other
flock 9
is_done && exit 0

python=$(find_python)
check_disk
echo "megatron-rl setup: installing into $venv (a few minutes; this happens once)"
is_usable_venv || "$python" -m venv --clear "$venv"
rm -f "$stamp"
pip() {
  "$venv/bin/python" -m pip --disable-pip-version-check -qq "$@" || fail "pip failed (its message is above); run this again to go on from here"
}
pip --retries 1 install --no-deps -r "$root/launch/requirements-torch.txt" # a closed network may lack its index and still have the build
pip install --no-deps -r "$root/launch/requirements.txt"
pip install --no-deps --no-build-isolation -e "$root"
wanted >"$stamp"
echo "megatron-rl setup: done"
