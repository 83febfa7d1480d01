#!/usr/bin/env bash
# Check the GPU code against the pinned packages on a machine without a GPU: install launch/requirements-gpu.txt into a separate
# environment and run tools/gpu_packages.py there with a fake Hopper GPU. Not in CI: the packages take 11 GB.
#   bash tools/gpu_packages.sh                      # into .venv-gpu-packages, removed afterwards; about 20 minutes on two busy cores
#   bash tools/gpu_packages.sh --venv=DIR engine    # into DIR, which is kept for the next call; only this check
#   PYTHON=/path/to/python3.12                      # use this interpreter
# Needs gcc, nm and readelf (binutils), 16 GB of disk and Python 3.11 or 3.12. Exit code 1 if a check fails, 2 if the checks cannot start.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
program=gpu_packages
pins="$root/launch/requirements-gpu.txt"
venv= checks=()
for option in "$@"; do
  case $option in
    --venv=?*) venv=$(realpath -m -- "${option#*=}") ;;
    -*) echo "megatron-rl $program: $option: is no option; the only option is --venv=DIR" >&2; exit 2 ;;
    *) checks+=("$option") ;;
  esac
done
keep=$venv
venv=${venv:-$root/.venv-gpu-packages}
print_dependencies() { (cd "$root" && sha256sum launch/requirements-gpu.txt launch/requirements-nodeps.txt && pwd -P && "$python" --version); }
. "$root/launch/common.sh"

for tool in gcc nm readelf; do command -v "$tool" >/dev/null || fail "no $tool (Ubuntu: apt install gcc binutils)"; done
python=$(find_python "Ubuntu: apt install python3.11-venv python3.11-dev" python3.11 python3.12)
check_disk 16000 ""
lock "${BASH_SOURCE[0]}"
[ -n "$keep" ] || trap 'rm -rf "$venv"' EXIT
if ! is_installed; then
  [ ! -e "$venv" ] || [ -f "$venv/pyvenv.cfg" ] || fail "$venv exists and is no virtual environment; name another folder"
  echo "megatron-rl $program: installing into $venv, at low priority"
  rm -rf "$venv"
  "$python" -m venv "$venv"
  export PIP_NO_CACHE_DIR=1 PIP_NO_COMPILE=1
  renice -n 19 $$ >/dev/null
  pip -q install --no-deps -r "$pins"
  pip -q install --no-deps --ignore-requires-python "$(grep ^megatron-core== "$root/launch/requirements-nodeps.txt")"
  pip -q install --no-deps --no-build-isolation -e "$root"
  print_dependencies >"$stamp"
fi
"$venv/bin/python" "$root/tools/gpu_packages.py" "${checks[@]}"
