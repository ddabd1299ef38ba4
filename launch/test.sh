#!/usr/bin/env bash
# The test suite, on two processes, without what is marked slow or hostile; arguments go to pytest, and a -m of
# theirs counts instead (bash launch/test.sh -m "not hostile" runs the slow ones too, as .ci/run does).
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
ensure_venv test,lint
exec .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
