#!/usr/bin/env bash
# Tests against the lowest version that pyproject.toml allows of each direct dependency, in .venv-lowest; arguments go
# to pytest instead of the fronts', the core's and the readers' tests.
set -euo pipefail
cd "$(dirname "$0")/.."
tests=("$@")
[ $# -gt 0 ] || tests=(tests/core tests/serve/test_{http_openai,http_bad_input,http_streams,grpc_front,clients,log_lines,metrics,page}.py
  tests/test_{settings,flags}.py tests/model/test_{convert,tokenizer}.py)
${PYTHON:-python3} -m venv .venv-lowest
.venv-lowest/bin/python -m pip install --quiet uv
.venv-lowest/bin/uv pip install --quiet --python .venv-lowest/bin/python --resolution lowest-direct -e ".[test]"
exec .venv-lowest/bin/python -m pytest -q "${tests[@]}"
