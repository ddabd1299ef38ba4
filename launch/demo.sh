#!/usr/bin/env bash
# Serves the embedded model: tensor-parallel prefill, pipeline-parallel decode. Arguments go to jdisagg.launch.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
ensure_venv
exec .venv/bin/python -m jdisagg.launch --mesh=prefill:tp2,decode:pp2 "$@"
