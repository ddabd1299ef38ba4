"""Writes a SLURM job: the router, then one component per role; each worker is a job step of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator

from jdisagg.cluster.job import ClusterJob, RoleWorkers, shared_arguments
from jdisagg.core.errors import ConfigError

HEAD = """#!/usr/bin/env bash
# {note}
# A router and {workers} as one heterogeneous job: sbatch launch/slurm.sbatch
# Flags of sbatch go on its command line (--partition, --account, --time). From the environment: JDISAGG_PYTHON, and
# JDISAGG_SECRET_FILE, a file that every node reads (created if absent).
#SBATCH --job-name={name}
{components}
set -euo pipefail

python=${{JDISAGG_PYTHON:-python}}
router_host=$(hostname)  # this script runs on the first node of the first component
# Two jobs on one node must not meet at a port, nor two groups of one job.
first_port=$((20000 + SLURM_JOB_ID * 64 % 12000))
secret=${{JDISAGG_SECRET_FILE:-$HOME/.jdisagg/secret-$SLURM_JOB_ID}}
if [ ! -s "$secret" ]; then
  (umask 077; mkdir -p "$(dirname "$secret")"; head -c 32 /dev/urandom | base64 > "$secret")
fi

shared=(
{shared}
  --secret_file="$secret"
)
control_port=${{JDISAGG_CONTROL_PORT:-{control_port}}}
"""
BODY = """
pids=()
stop() { kill -TERM "${pids[@]}" 2>/dev/null || true; }

# start COMMAND...: runs it in the background
start() {
  "$@" &
  pids+=($!)
}

# keep NAME SRUN_FLAGS... COMMAND...: runs a step, and again if it fails, until the job is stopped
keep() {
  local name=$1 step="" stopping="" code
  shift
  trap 'stopping=1; [ -z "$step" ] || kill -TERM "$step" 2>/dev/null || true' TERM INT
  while [ -z "$stopping" ]; do
    srun --job-name="$name" --kill-on-bad-exit=1 --exact "$@" &
    step=$!
    code=0
    while kill -0 "$step" 2>/dev/null; do
      code=0
      wait "$step" || code=$?
    done
    echo "$(date -u +%FT%TZ) $name ended with $code" >&2
    case $code in
      0) break ;;                      # stopped on request
      2) kill -TERM $$; break ;;       # a mistake, which another start would only repeat
    esac
    [ -n "$stopping" ] || sleep "${JDISAGG_RESTART_S:-5}" &
    wait $! || true
  done
}

# worker COMPONENT INDEX SIZE NAME SRUN_FLAGS... -- FLAGS...: one worker of SIZE processes, with a port of its own
worker() {
  local component=$1 port=$((first_port + $2)) size=$3 name=$4 options=()
  shift 4
  while [ "$1" != -- ]; do
    options+=("$1")
    shift
  done
  shift
  # shellcheck disable=SC2016  # each process says its own host
  JAX_COORDINATOR_PORT=$port keep "$name" --het-group="$component" --nodes="$size" --ntasks="$size" "${options[@]}" \\
    bash -c 'exec "$@" --kv_advertise="$(hostname)"' worker \\
    "$python" -m jdisagg.launch "${shared[@]}" --router="$router_host:$control_port" --kv_listen=0.0.0.0:0 "$@"
}

trap stop TERM INT
"""
TAIL = """
while kill -0 "${pids[@]}" 2>/dev/null; do wait || true; done
"""


def script(job: ClusterJob, note: str) -> str:
    """Returns the text of `launch/slurm.sbatch`."""
    shared = "\n".join(f"  {_quoted(each)}" for each in shared_arguments(job))
    workers = " and ".join(f"{part.replicas} x {part.role}" for part in job.parts)
    components = "\n#SBATCH hetjob\n".join([_component(1, 4, "")] + [_of_part(part, job) for part in job.parts])
    head = HEAD.format(
        note=note,
        workers=workers,
        name=job.name,
        components=components,
        shared=shared,
        control_port=job.settings.control_port,
    )
    return head + BODY + _steps(job) + TAIL


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _component(tasks: int, cpus: int, more: str) -> str:
    return f"#SBATCH --ntasks={tasks} --cpus-per-task={cpus}{more}"


def _of_part(part: RoleWorkers, job: ClusterJob) -> str:
    gpus = f" --gpus-per-task={part.devices}" if job.platform == "gpu" else ""
    one_per_host = " --ntasks-per-node=1" if part.size > 1 else ""  # one process per host
    return _component(part.processes, _cpus(part, job), gpus + one_per_host)


def _cpus(part: RoleWorkers, job: ClusterJob) -> int:
    return part.devices if job.platform == "cpu" else 4 * part.devices


def _steps(job: ClusterJob) -> str:
    lines = [
        'start keep router --het-group=0 --nodes=1 --ntasks=1 "$python" -m jdisagg.launch "${shared[@]}" \\',
        '  --role=router --host=0.0.0.0 --control_port="$control_port"',
    ]
    first = 0
    for component, part in enumerate(job.parts, 1):
        gpus = f"--gpus-per-task={part.devices} " if job.platform == "gpu" else ""
        options = f"--cpus-per-task={_cpus(part, job)} {gpus}-- --role={part.role} --group_size={part.size}"
        named = ' --group="$name"' if part.size > 1 else ""
        lines += [
            f"for index in $(seq 0 {part.replicas - 1}); do",
            f'  name="{part.role}-$index"',
            f'  start worker {component} $(({first} + index)) {part.size} "$name" {options}{named}',
            "done",
        ]
        first += part.replicas
    return "\n".join(lines) + "\n"


# Parses SLURM's node lists: `node[01-03,7],login` is node01, node02, node03, node7 and login.

MOST_NODES = 65536  # a longer list is an error
_RANGE = re.compile(r"(\d{1,10})(?:-(\d{1,10}))?")
_PART = re.compile(r"(?:[^\[\],\s]|\[[\d,-]+\])+")
_BRACKET = re.compile(r"\[([\d,-]+)\]")


def expand(text: str) -> list[str]:
    """Returns every node in the list's order. Raises ConfigError if it cannot be read."""
    nodes: list[str] = []
    for part in _parts(text):
        for node in _nodes(part, text):
            nodes.append(node)
            if len(nodes) > MOST_NODES:
                raise ConfigError(f"the list of nodes {text[:80]!r} has more than {MOST_NODES}")
    return nodes


def _parts(text: str) -> list[str]:
    """Splits the list at its commas outside brackets."""
    parts, end = list[str](), -1
    for match in _PART.finditer(text):
        if match.start() != end + 1 or (end >= 0 and text[end] != ","):
            break
        parts.append(match[0])
        end = match.end()
    if end != len(text):
        raise ConfigError(f"cannot read the list of nodes {text[:80]!r}; one is as node[01-03,7],login")
    return parts


def _nodes(part: str, text: str) -> Iterator[str]:
    match = _BRACKET.search(part)
    if match is None:
        yield part
        return
    for number in _numbers(match[1], text):
        for rest in _nodes(part[match.end() :], text):
            yield f"{part[: match.start()]}{number}{rest}"


def _numbers(ranges: str, text: str) -> Iterator[str]:
    """Yields the numbers of `01-03,7`, padded to the width of the first number of each range."""
    for each in ranges.split(","):
        match = _RANGE.fullmatch(each)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ConfigError(f"cannot read {each!r} in the list of nodes {text[:80]!r}")
        for number in range(int(match[1]), int(match[2] or match[1]) + 1):
            yield str(number).zfill(len(match[1]))
