"""Adapters over processes: loaded while they run, by every process of a group as well, and known to who comes in the
place of one that was killed."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from jdisagg import LLM, SamplingParams
from jdisagg.model.checkpoint import read_model
from jdisagg.serve.deploy.deployment import EMBEDDED_MODEL
from tests.adapter_files import write_adapter
from tests.serve.cluster.processes import Cluster, Process, private, status, until

pytestmark = pytest.mark.slow
KEY = "the-key-of-the-admin"
SIZES = {
    "max_model_len": 512,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "prefill_buckets": "64",
    "page_size": 16,
    "table_buckets": "512",
}
ASKED = {"prompt": "def area(width, height):\n", "temperature": 0, "max_tokens": 200, "ignore_eos": True, "logprobs": 1}


@pytest.fixture
def grouped(tmp_path: Path, compiled: Path) -> Iterator[Cluster]:
    """Its own: the other's router has its port still."""
    cluster = Cluster(tmp_path, compiled, "prefill:tp1,decode:tp2")
    yield cluster
    cluster.stop()


def start(cluster: Cluster, role: str) -> Process:
    own = [f"--api_keys_file={cluster.folder / 'keys'}", "--queue_timeout_s=200"] if role == "router" else []
    return cluster.start(role, "--enable_lora", "--max_loras=2", *own)


def load(cluster: Cluster, name: str, folder: Path) -> None:
    body = json.dumps({"lora_name": name, "lora_path": str(folder)}).encode()
    request = urllib.request.Request(f"{cluster.url}/v1/load_lora_adapter", body, {"authorization": f"Bearer {KEY}"})
    assert urllib.request.urlopen(request, timeout=60).status == 200


def test_answers_of_adapters_outlive_their_decode_process(cluster: Cluster, pool, tmp_path: Path):
    cluster.mesh = "prefill:tp1,decode:tp1"
    private(cluster.folder / "keys", f"admin {KEY}\n")
    processes = [start(cluster, role) for role in ("router", "prefill", "decode")]
    until(lambda: status(f"{cluster.url}/ready") == 200, "a router that is ready")
    cluster.await_workers(*processes[1:])
    model = read_model(EMBEDDED_MODEL)
    for seed, name in enumerate(("sql", "tales")):
        load(cluster, name, write_adapter(tmp_path / name, model, seed, strength=0.5))
    bodies = [{**ASKED, "model": name} for name in ("sql", "tales", "embedded")]
    undisturbed = [cluster.ask(**body).tokens for body in bodies]
    assert len({tuple(tokens) for tokens in undisturbed}) == 3

    answers = [cluster.begin(pool, pieces=3, **body) for body in bodies]
    processes[2].kill()
    processes[2] = start(cluster, "decode")
    for expected, answer in zip(undisturbed, answers, strict=True):
        told = answer.result()
        assert told.error is None and told.tokens == expected
    cluster.await_workers(*processes[1:])
    cluster.await_all_free()


@pytest.mark.timeout(900)  # four processes start at once
def test_every_process_of_a_group_adds_the_adapters_that_rows_ask_for(grouped: Cluster, pool, tmp_path: Path):
    """One is loaded while they run; rows of adapters and of none in one step say what each says alone elsewhere."""
    model = read_model(EMBEDDED_MODEL)
    private(grouped.folder / "keys", f"admin {KEY}\n")
    room = ("--enable_lora", "--max_loras=2", "--table_buckets=512")
    prefill = [start(grouped, role) for role in ("router", "prefill")][1]
    group = grouped.start_group("decode", *room)
    until(lambda: status(f"{grouped.url}/ready") == 200, "a router that is ready")
    grouped.await_workers(prefill, group[0])
    for seed, name in enumerate(("sql", "tales")):
        load(grouped, name, write_adapter(tmp_path / name, model, seed, strength=0.5))
    names = ("sql", None, "tales")
    bodies = [{**ASKED, "max_tokens": 24, "model": name or "embedded"} for name in names]
    together = [answer.result() for answer in [grouped.begin(pool, pieces=0, **body) for body in bodies]]
    assert [told.error for told in together] == [None] * 3
    asked = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=1)
    folders = ",".join(f"{name}={tmp_path / name}" for name in names if name)
    with LLM(mesh=grouped.mesh, lora=folders, compile_cache_dir=str(grouped.cache), **SIZES) as one:
        found = [name and one.adapter(name) for name in names]
        alone = [one.generate(str(ASKED["prompt"]), replace(asked, adapter=adapter)) for adapter in found]
    assert [told.text for told in together] == [each.text for each in alone]
    assert len({told.text for told in together}) == 3
    assert sum(value for _, value in grouped.samples("recompiles_total")) == 0
