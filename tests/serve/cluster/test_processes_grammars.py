"""Processes are killed under answers that are held to a form: they end with the same tokens, and are of their form."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from tests.serve.cluster.processes import Cluster, Process, status, until

pytestmark = pytest.mark.slow

ITEM = {
    "type": "object",
    "properties": {
        "identifier": {"type": "integer", "minimum": 0, "maximum": 9999},
        "kind": {"enum": ["primary", "secondary"]},
    },
    "required": ["identifier", "kind"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 9, "maxItems": 12}
SHORT = {**SCHEMA, "minItems": 2, "maxItems": 3}
WORDS = {"structured_outputs": {"regex": "(copy|move) ([a-f]{40} ){3}!"}}
COMPACT = {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}
SPACED = {"structured_outputs": {"json": SHORT}}
WARM = {"temperature": 0.8, "seed": 5}
BODIES: list[dict[str, Any]] = [
    {"prompt": "def f(", "temperature": 0, **COMPACT},
    {"prompt": "import os\n\n\nclass Tree:\n", **WARM, **COMPACT},
    {"prompt": "for name in names:\n    print(name)\n" * 6, **WARM, **SPACED},
    {"prompt": "def g(", **WARM, **WORDS},
]


def start(cluster: Cluster, role: str, *, drafts: bool = True) -> Process:
    """drafts: forced tokens are those of each slot's own rows; else of a step's eight (`--forced_tokens`)."""
    more = ["--speculative=grammar"] if drafts else []
    return cluster.start(role, *more, *(["--queue_timeout_s=200"] if role == "router" else []))


def busy(cluster: Cluster, processes: list[Process]) -> Process:
    """Whichever of them holds pages first."""
    return until(lambda: next((each for each in processes if cluster.used(each.worker)), None), "a busy one")


def forced(cluster: Cluster, process: Process) -> float:
    """Tokens that the worker drew behind others in one step."""
    rows = cluster.samples("spec_decode_accepted_tokens_total")
    return sum(value for labels, value in rows if labels["worker"] == process.worker)


def test_answers_held_to_a_form_outlive_their_decode_and_prefill_processes(cluster: Cluster, pool):
    cluster.mesh = "prefill:tp1,decode:tp1"
    processes = [start(cluster, role) for role in ("router", "decode", "prefill")]
    processes.insert(2, start(cluster, "decode", drafts=False))
    until(lambda: status(f"{cluster.url}/ready") == 200, "a router that is ready")
    cluster.await_workers(*processes[1:])
    asked = [{"max_tokens": 440, "logprobs": 1, **body} for body in BODIES]
    undisturbed = cluster.ask_all(asked)
    for answer, schema in zip(undisturbed, (SCHEMA, SCHEMA, SHORT), strict=False):
        jsonschema.validate(json.loads(answer.text), schema)

    for victims in (processes[1:3], processes[3:]):
        answers = [cluster.begin(pool, pieces=2 - number // 2, **body) for number, body in enumerate(asked)]
        dead = busy(cluster, victims)
        dead.kill()
        processes[processes.index(dead)] = start(cluster, dead.role, drafts=dead.role != "decode")
        for expected, answer in zip(undisturbed, answers, strict=True):
            told = answer.result()
            assert told.error is None and told.finish == expected.finish == "stop"
            assert told.tokens == expected.tokens and told.text == expected.text
        cluster.await_workers(*processes[1:])
        cluster.await_all_free()
    assert any(forced(cluster, each) for each in processes[1:3]), "of drafts, or of chunks without"
