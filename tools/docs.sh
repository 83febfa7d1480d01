#!/usr/bin/env bash
# Build the static site of all pages, with search, into build/site, in an environment of its own (.venv-docs, 60 MB). A link that does not
# resolve fails the build.
#   bash tools/docs.sh           then open build/site/index.html
#   PYTHON=/path/to/python3.12   use this interpreter (default: the first usable one on PATH)
#   VENV=DIR                     use this environment
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
venv="${VENV:-$root/.venv-docs}"
program=docs
. "$root/launch/common.sh"

print_dependencies() {
  (cd "$root" && sha256sum launch/requirements-docs.txt && echo "$venv")
}

lock "${BASH_SOURCE[0]}"
if ! is_installed; then
  python=$(find_python "Debian, Ubuntu: apt install python3.11 python3.11-venv" python3.11 python3.12 python3 python)
  "$python" -m venv --clear "$venv"
  pip -q install --no-deps -r "$root/launch/requirements-docs.txt"
  print_dependencies >"$stamp"
fi

# The pages lie in several folders and link to source files, so the site is built from a copy of the tree.
stage=$(mktemp -d)
trap 'rm -rf "$stage" "$stage.log"' EXIT
[ -e "$root/.git" ] || fail "$root: is not a git repository; clone it"
(cd "$root" && git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$stage" 2>/dev/null) || true # deleted files
export NO_MKDOCS_2_WARNING=1 # about another version
DOCS_DIR=$stage SITE_DIR=$root/build/site "$venv/bin/python" -m mkdocs build --strict --config-file "$root/tools/mkdocs.yml" >"$stage.log" 2>&1 || {
  grep -E "WARNING|ERROR|rror:" "$stage.log" >&2
  exit 1
}
echo "megatron-rl docs: built $root/build/site/index.html"
