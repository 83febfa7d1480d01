#!/usr/bin/env bash
# Hold the GPU code against the packages that it is pinned to, on a machine without a GPU: install launch/requirements-gpu.txt into an
# environment of its own, then run tools/checks/gpu_packages.py there, behind a faked Hopper GPU. Not in CI: 11 GB of packages.
#   bash tools/checks/gpu_packages.sh                      # into .venv-gpu-packages, which is removed afterwards; about 20 minutes on two busy cores
#   bash tools/checks/gpu_packages.sh --venv=DIR engine    # into DIR, which stays for another call; only this check
#   bash tools/checks/gpu_packages.sh --extension=FILE     # with Transformer Engine's torch extension, as launch/install_gpu.sh builds it:
#                                                          # .venv-gpu/lib/python3.*/site-packages/transformer_engine_torch.*.so
#   PYTHON=/path/to/python3.12                             # use this interpreter; an extension is of one Python version
# Needs gcc, nm and readelf (binutils), 16 GB of disk and Python 3.11 or 3.12. Exit code 1 where a check fails, 2 where it cannot begin.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
program=gpu_packages
pins="$root/launch/requirements-gpu.txt"
venv= extension= checks=()
for option in "$@"; do
  case $option in
    --venv=?*) venv=$(realpath -m -- "${option#*=}") ;;
    --extension=?*) extension=$(realpath -m -- "${option#*=}") ;;
    -*) echo "megatron-rl $program: $option: is no option; there are --venv=DIR and --extension=FILE" >&2; exit 2 ;;
    *) checks+=("$option") ;;
  esac
done
keep=$venv
venv=${venv:-$root/.venv-gpu-packages}
print_dependencies() { (cd "$root" && sha256sum launch/requirements-common.txt launch/requirements-gpu.txt && pwd -P && "$python" --version); }
. "$root/launch/common.sh"

for tool in gcc nm readelf; do command -v "$tool" >/dev/null || fail "no $tool (Ubuntu: apt install gcc binutils)"; done
python=$(find_python "Ubuntu: apt install python3.11-venv python3.11-dev" python3.11 python3.12)
if [ -n "$extension" ]; then
  suffix=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
  [ -f "$extension" ] || fail "--extension=$extension: there is no such file"
  [ "$(basename "$extension")" = "transformer_engine_torch$suffix" ] ||
    fail "--extension=$extension: is not transformer_engine_torch$suffix, that of $python; set PYTHON to the interpreter that it was built for"
fi
check_disk 16000 ""
lock "${BASH_SOURCE[0]}"
[ -n "$keep" ] || trap 'rm -rf "$venv"' EXIT
if ! is_installed; then
  [ ! -e "$venv" ] || [ -f "$venv/pyvenv.cfg" ] || fail "$venv is there and is no virtual environment; name another folder"
  echo "megatron-rl $program: installing into $venv, at low priority"
  rm -rf "$venv"
  "$python" -m venv "$venv"
  export PIP_NO_CACHE_DIR=1 PIP_NO_COMPILE=1
  renice -n 19 $$ >/dev/null
  pip -q install --no-deps -r "$pins"
  pip -q install --no-deps --no-build-isolation -e "$root"
  print_dependencies >"$stamp"
fi
libraries=$(echo "$venv"/lib/python3.*/site-packages/transformer_engine/wheel_lib)
rm -f "$libraries"/transformer_engine_torch.*
[ -z "$extension" ] || ln -s "$extension" "$libraries"
"$venv/bin/python" "$root/tools/checks/gpu_packages.py" "${checks[@]}"
