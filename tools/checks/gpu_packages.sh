#!/usr/bin/env bash
# Hold the GPU code against the packages that it is pinned to, on a machine without a GPU: install launch/requirements-gpu.txt into an
# environment of its own, then run tools/checks/gpu_packages.py there, behind a faked Hopper GPU. Not in CI: 11 GB of packages.
#   bash tools/checks/gpu_packages.sh                  # into .venv-gpu-packages, which is removed afterwards; about 40 minutes on two busy cores
#   bash tools/checks/gpu_packages.sh --keep engine    # the environment stays, for another call; only this check
#   bash tools/checks/gpu_packages.sh --extension      # also build Transformer Engine's torch extension from source: 40 minutes more
# Needs gcc, nm and readelf (binutils), 16 GB of disk and Python 3.11 or 3.12. Exit code 1 where a check fails, 2 where it cannot begin.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
venv="$root/.venv-gpu-packages"
program=gpu_packages
pins="$root/launch/requirements-gpu.txt"
print_dependencies() { (cd "$root" && sha256sum launch/requirements-common.txt launch/requirements-gpu.txt && pwd -P); }
. "$root/launch/common.sh"

keep= extension= checks=()
for option in "$@"; do
  case $option in
    --keep) keep=1 ;;
    --extension) extension=1 ;;
    -*) fail "$option: is no option; there are --keep and --extension" ;;
    *) checks+=("$option") ;;
  esac
done
for tool in gcc nm readelf; do command -v "$tool" >/dev/null || fail "no $tool (Ubuntu: apt install gcc binutils)"; done
python=$(find_python "Ubuntu: apt install python3.11-venv python3.11-dev" python3.11 python3.12)
check_disk 16000 ""
lock "${BASH_SOURCE[0]}"
[ -n "$keep" ] || trap 'rm -rf "$venv"' EXIT
if ! is_installed; then
  echo "megatron-rl $program: installing into $venv, at low priority"
  rm -rf "$venv"
  "$python" -m venv "$venv"
  export PIP_NO_CACHE_DIR=1 PIP_NO_COMPILE=1
  renice -n 19 $$ >/dev/null
  pip -q install --no-deps -r "$pins"
  pip -q install --no-deps --no-build-isolation -e "$root"
  print_dependencies >"$stamp"
fi
if [ -n "$extension" ] && ! "$venv/bin/python" -c "import importlib.metadata as m; m.version('transformer-engine-torch')" 2>/dev/null; then
  version=$(sed -n "s/^transformer-engine==//p" "$pins")
  NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_PYTORCH_FORCE_BUILD=TRUE MAX_JOBS=${MAX_JOBS:-2} \
    pip -q install --no-deps --no-build-isolation --no-cache-dir "transformer-engine-torch==$version"
fi
code=0
"$venv/bin/python" "$root/tools/checks/gpu_packages.py" "${checks[@]}" || code=$?
exit "$code"
