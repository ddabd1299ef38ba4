# Sourced by demo.sh and test.sh: makes .venv on first use, and again after pyproject.toml has changed.
# `ensure_venv [EXTRAS]` installs the project with extras, as "test,lint". PYTHON names the interpreter (default: python3.12, 3.11 or python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo "$candidate"; return; fi
  done
  echo "jdisagg needs Python 3.11 or newer; set PYTHON=/path/to/python3.12" >&2
  exit 2
}

ensure_venv() {
  local extras=${1:-} stamp=".venv/.jdisagg-${1:-}" python
  if [ -e "$stamp" ] && [ "$stamp" -nt pyproject.toml ]; then return; fi
  python=$(find_python)
  if [ ! -x .venv/bin/python ]; then
    echo "jdisagg: first use: making .venv with $("$python" --version) (about 840 MB, some minutes)"
    "$python" -m venv .venv
  fi
  echo "jdisagg: installing jax and the other packages into .venv ..."
  .venv/bin/python -m pip install --disable-pip-version-check --progress-bar on -e ".${extras:+[$extras]}"
  touch "$stamp"
  echo "jdisagg: .venv is ready"
}

# Large host copies (KV across meshes on the CPU) are page-fault bound with glibc's defaults.
export MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_TOP_PAD_=268435456
