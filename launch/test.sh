#!/usr/bin/env bash
# The whole test suite, on two processes; arguments go to pytest (for example: bash launch/test.sh -m "not slow").
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
ensure_venv test,lint
exec .venv/bin/python -m pytest -n 2 --dist loadfile "$@"
