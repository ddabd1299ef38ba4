#!/usr/bin/env bash
# The embedded model in three processes: a router, a prefill and a decode process. Ctrl-C ends all. Arguments go to each.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
ensure_venv
secret=$(mktemp)
head -c 32 /dev/urandom | base64 > "$secret"
serve() { .venv/bin/python -m jdisagg.launch --mesh=prefill:tp2,decode:pp2 --secret_file="$secret" "$@" & }
trap 'kill $(jobs -p) 2>/dev/null; wait; rm -f "$secret"' EXIT
serve --role=router "$@"
serve --role=prefill --router=127.0.0.1:8100 "$@"
serve --role=decode --router=127.0.0.1:8100 "$@"
wait
