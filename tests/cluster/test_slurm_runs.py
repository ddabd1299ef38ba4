"""The emitted job on a real SLURM of three nodes, all this machine: it starts, answers, loses workers, ends clean."""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from jdisagg.commands import plan
from jdisagg.core.settings import Settings
from tests.cluster.slurm import Cluster, cluster, missing
from tests.environment import quick
from tests.fixtures import conformance
from tests.ports import free_port
from tests.serve.cluster.processes import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=f"no SLURM here: {', '.join(missing())}"),
    pytest.mark.timeout(600),
]
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Job:
    """One that was handed in: its number, its router's port, the secret that only its processes are told."""

    slurm: Cluster
    number: str
    port: int
    secret: Path
    log: Path

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def completion(self) -> str:
        body = json.dumps({"prompt": "one two three", "max_tokens": 24, "temperature": 0, "ignore_eos": True}).encode()
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=200) as answer:
            return json.load(answer)["choices"][0]["text"]

    def processes(self, role: str) -> list[int]:
        """Ids of the job's own Python processes of this role."""
        return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and self._plays(path, role)]

    def _plays(self, process: Path, role: str) -> bool:
        try:
            words = (process / "cmdline").read_text().split("\0")
        except OSError:  # it has ended
            return False
        return words[1:3] == ["-m", "jdisagg.launch"] and {f"--role={role}", f"--secret_file={self.secret}"} <= {*words}

    def said(self) -> str:
        return self.log.read_text(errors="replace")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as here:
        yield here


def handed_in(slurm: Cluster, folder: Path, mesh: str, devices_per_host: int) -> Job:
    """The job of a small model on this mesh; its output is the test's to tell."""
    port, log = free_port(), folder / "job.txt"
    settings = Settings(
        model=str(conformance.load("llama3").folder),
        mesh=mesh,
        platform="cpu",
        kv_tokens=2048,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        prefill_buckets="64",
        page_size=16,
        http_port=port,
        grpc_port=-1,
        control_port=free_port(),
        queue_timeout_s=200,
    )
    made = plan.files(plan.JobValues(settings, "small", "", devices_per_host, "v5p", "By a test"), ["slurm"])
    script, secret = folder / "slurm.sbatch", folder / "secret"
    script.write_text(made["slurm.sbatch"])
    told = {"JDISAGG_PYTHON": sys.executable, "JDISAGG_SECRET_FILE": str(secret), "JDISAGG_RESTART_S": "1"}
    told |= {name: quick()[name] for name in ("JAX_PLATFORMS", "XLA_FLAGS")} | {"PYTHONPATH": str(ROOT)}
    number = slurm.run("sbatch", "--parsable", f"--output={log}", f"--chdir={ROOT}", str(script), **told)
    job = Job(slurm, number, port, secret, log)
    until(job.ready, "a job that is ready", 280)
    return job


def test_a_job_starts_answers_loses_each_worker_and_ends_clean(slurm: Cluster, tmp_path: Path):
    job = handed_in(slurm, tmp_path, "prefill:tp1,decode:tp1", 8)
    steps = job.slurm.run("squeue", "-s", "-h", "-o", "%j")
    assert {"router", "prefill-0", "decode-0"} <= {*steps.split()}
    first = job.completion()
    assert first
    for role in ("decode", "prefill"):
        (victim,) = job.processes(role)
        os.kill(victim, signal.SIGKILL)
        assert job.completion() == first, f"another answer after the {role} process was killed"
        (other,) = job.processes(role)
        assert other != victim
    said = ended(job)
    assert said.count("leaving: nothing is left here") == 2, said
    for name in ("router", "prefill-0", "decode-0"):
        assert f"{name} ended with 0" in said, said


def test_a_worker_of_two_processes_is_a_step_on_two_nodes_and_is_started_again_whole(slurm: Cluster, tmp_path: Path):
    job = handed_in(slurm, tmp_path, "prefill:tp2,decode:tp1", 1)
    first, members = job.completion(), job.processes("prefill")
    assert first and len(members) == 2
    os.kill(members[1], signal.SIGKILL)
    assert job.completion() == first
    others = job.processes("prefill")
    assert len(others) == 2 and not {*others} & {*members}
    said = ended(job)
    assert "rank 0 of 2" in said and "rank 1 of 2" in said


def ended(job: Job) -> str:
    """Cancels it; nothing of it is left, and this is what it said."""
    job.slurm.run("scancel", job.number)
    until(lambda: not job.slurm.run("squeue", "-h"), "an empty queue", 60)
    assert not [process for role in ("router", "prefill", "decode") for process in job.processes(role)]
    return job.said()


def test_a_mistake_in_the_settings_ends_the_job_and_is_not_tried_again(slurm: Cluster, tmp_path: Path):
    settings = Settings(model="/nowhere/model", mesh="prefill:tp1,decode:tp1", platform="cpu", control_port=free_port())
    made = plan.files(plan.JobValues(settings, "wrong", "", 8, "v5p", "Made by a test"), ["slurm"])
    script, log = tmp_path / "slurm.sbatch", tmp_path / "job.txt"
    script.write_text(made["slurm.sbatch"])
    told = {"JDISAGG_PYTHON": sys.executable, "JDISAGG_SECRET_FILE": str(tmp_path / "secret"), "PYTHONPATH": str(ROOT)}
    slurm.run("sbatch", "--parsable", f"--output={log}", f"--chdir={ROOT}", str(script), **told)
    until(lambda: not slurm.run("squeue", "-h"), "the end of the job", 120)
    assert log.read_text().count("jdisagg: --model=/nowhere/model: there is no config.json") in (1, 2, 3)
