#!/usr/bin/env bash
# Install the CPU tier into .venv: torch's CPU build, Megatron-Core, SGLang, and this project (editable), with pinned versions.
# Returns at once if the installation is complete, and continues an incomplete one.
#   PYTHON=/path/to/python3.11     use this interpreter (default: the first usable one on PATH)
#   MEGATRON_RL_MIN_DISK_MB=4000   required disk space: 1.6 GB for .venv, the rest for pip
# Exit code 2 with one line if Python or the disk space is insufficient.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
venv="$root/.venv"
program=setup
uv=uv==0.13.9 # installs the pins faster than pip
. "$root/launch/common.sh"

# The folder is included because a virtual environment does not work after it is moved or copied.
print_dependencies() {
  (cd "$root" && sha256sum launch/{requirements.txt,requirements-nodeps.txt,setup.sh,common.sh,uv_settings.py} pyproject.toml && pwd -P)
}

# Succeed if the existing virtual environment can be completed. Otherwise it is made from scratch.
is_usable_venv() {
  was_made_here && is_usable_python "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1
}

# Show how many packages are being installed, and the last one: on a terminal in one line, otherwise every 20th. pip's words for a package
# are "Collecting", "Processing" if its wheel is a local file, and "Requirement already satisfied"; uv's is "+".
show_progress() {
  local count=0 total words package line
  total=$(cat "$root"/launch/requirements{,-nodeps}.txt | grep -c ==)
  while read -r -a words; do
    case ${words[0]:-} in
      Collecting | Processing) package=${words[1]##*/} ;;
      +) package=${words[1]%%==*} ;;
      Requirement) package=${words[3]} ;;
      *) continue ;;
    esac
    count=$((count + 1)) line="megatron-rl setup: package $count of $total, $package"
    if [ -t 1 ]; then printf '\r\033[K%s' "$line"; elif ((count % 20 == 0 || count == total)); then echo "$line"; fi
  done
  if [ -t 1 ]; then printf '\r\033[K'; fi
}

# install_by_uv PINS: install with uv, which takes a fraction of pip's time. Fail if uv cannot be had, or cannot do what pip is configured to.
install_by_uv() (
  set -o pipefail
  settings=$("$venv/bin/python" "$root/launch/uv_settings.py" 2>"$venv/uv.log") || return
  "$venv/bin/python" -m pip -q install --no-deps --only-binary :all: "$uv" >"$venv/uv.log" 2>&1 || return
  mapfile -t settings <<<"${settings:-UV_NO_CONFIG=1}"
  env "${settings[@]}" "$venv/bin/uv" --no-config pip install --python "$venv/bin/python" --no-deps -r "$1" 2>&1 | tee "$venv/uv.log"
)

# Install all pins: torch as only pip chooses its CPU build, what declares another Python with pip, and the others with uv, or else with several
# pips, because one pip mostly waits for the network. Print their output, and fail if one fails.
install_pins() (
  set +e
  export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
  pip=("$venv/bin/python" -m pip install --progress-bar off --no-compile --no-deps) pins="$root/launch/requirements" status=0
  torch=$(grep ^torch== "$pins.txt")
  exec 2> >(grep --line-buffered -v "^WARNING: .* invalid " >&2) # of a package that another pip is installing
  "${pip[@]}" --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu "$torch" & # one retry: the wheel may be cached
  "${pip[@]}" --ignore-requires-python -r "$pins-nodeps.txt" &
  jobs=$(jobs -p)
  others="$venv/others.txt"
  grep == "$pins.txt" | grep -v ^torch== >"$others"
  if ! install_by_uv "$others"; then
    reason=$(grep -im 1 -E "^(error|pip's)" "$venv/uv.log")
    echo "megatron-rl setup: installing without uv, which takes longer: ${reason:-see $venv/uv.log}" >&2
    xargs -P 3 -n 20 "${pip[@]}" <"$others" || status=1
  fi
  for job in $jobs; do wait "$job" || status=1; done
  exit $status
)

is_installed && exit 0
lock "${BASH_SOURCE[0]}"
is_installed && exit 0
[ ! -L "$venv" ] || fail "$venv is a link, and an installation would empty its target; remove the link"

python=$(find_python "Debian, Ubuntu: apt install python3.11 python3.11-venv" python3.11 python3.12 python3 python)
check_disk "${MEGATRON_RL_MIN_DISK_MB:-4000}" "; free some, or move the clone"
echo "megatron-rl setup: installing into $venv (a few minutes; this happens once)"
is_usable_venv || "$python" -m venv --clear "$venv"
rm -f "$stamp"
install_pins | show_progress || fail "pip failed (see its message above); run this script again to continue"
pip -qq install --no-deps --no-build-isolation -e "$root"
print_dependencies >"$stamp"
echo "megatron-rl setup: done"
# Compile what a run imports, while the caller goes on.
modules="rollout_sglang.server, sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler, megatron_rl.training.session"
(cd / && nice env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -c "import $modules") >/dev/null 2>&1 9>&- &
