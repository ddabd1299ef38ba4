#!/usr/bin/env bash
# Serves SmolLM2-135M-Instruct, fetched once (without network: the embedded model): tensor-parallel prefill,
# pipeline-parallel decode. Arguments go to jdisagg.launch, as --model=FOLDER or --chat.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
ensure_venv
exec .venv/bin/python -m jdisagg.launch --model=demo "$@"
