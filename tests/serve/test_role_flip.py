"""Real machines change their roles while requests run: no request is lost, and no token is another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import jdisagg
from jdisagg.commands.replay import replay
from jdisagg.core.events import ROUTER, ChangeRole
from jdisagg.core.journal import read_lines
from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import Role
from jdisagg.engine import mesh_executor
from jdisagg.policy.worker.drain import WorkerStatus
from tests.fixtures import conformance
from tests.serve.live_http import eventually

FAMILY = conformance.load("llama3")
GREEDY = jdisagg.SamplingParams(max_tokens=24, temperature=0.0, stop_token_ids=(0,), ignore_eos=True)
SIZES: dict[str, Any] = {
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "page_size": 16,
    "load_format": "hf",
}


class Load:
    """Asks for the same answers again and again, until it is told to stop; `wrong` are those that were others."""

    def __init__(self, llm: jdisagg.LLM) -> None:
        self.llm, self.rounds, self.wrong = llm, 0, list[Any]()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                got = answers(self.llm)
            except Exception as error:
                got = error
            if got != FAMILY.greedy:
                self.wrong.append(got)
            self.rounds += 1

    def __enter__(self) -> Load:
        self._thread.start()
        eventually(lambda: self.rounds >= 1, 120)
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()


def answers(llm: jdisagg.LLM) -> list[list[int]]:
    return [list(answer.token_ids) for answer in llm.generate_all(FAMILY.prompts, GREEDY)]


@contextmanager
def running(mesh: str, **settings: Any) -> Iterator[jdisagg.LLM]:
    with jdisagg.LLM(model=str(FAMILY.folder), mesh=mesh, **SIZES, **settings) as llm:
        yield llm


def flip(llm: jdisagg.LLM, worker: str, role: Role, mesh: str, drain_s: float = 30.0) -> None:
    """Asks for it, and waits until the worker has joined."""
    name, driver = WorkerId(worker), llm.service.driver
    config = llm.service.pools.shapes()[name].find(role, mesh).config
    driver.post(ROUTER, ChangeRole(name, 1 << 20, config, drain_s))
    router = driver.actors[ROUTER]
    eventually(
        lambda: router.peers[name].config == config and router.members.standing_of(name) is WorkerStatus.SERVING, 240
    )


@pytest.mark.slow
def test_a_prefill_worker_decodes_and_prefills_again_under_load():
    with running("prefill:2xtp1,decode:tp1") as llm, Load(llm) as load:
        flip(llm, "prefill-1", Role.DECODE, "tp1", 0.0)
        rounds, worker = load.rounds, llm.service.driver.actors[WorkerId("prefill-1")]
        eventually(lambda: load.rounds >= rounds + 2, 120)
        assert worker.config.role is Role.DECODE
        (described,) = [each for each in llm.service.pools.described() if each["worker"] == "prefill-1"]
        assert described["role"] == "decode" and described["took"]["read_again"] == ()
        flip(llm, "prefill-1", Role.PREFILL, "tp1")
        rounds = load.rounds
        eventually(lambda: load.rounds >= rounds + 1, 120)
    assert not load.wrong
    assert llm.service.recompiles() == 0
    journal = llm.service.journal
    assert replay(*read_lines([line + "\n" for line in journal.lines()])) == journal.num_recorded


@pytest.mark.slow
def test_two_shards_become_two_stages_and_two_stages_two_shards_under_load():
    with running("prefill:2xtp2,decode:2xpp2") as llm, Load(llm) as load:
        flip(llm, "prefill-0", Role.DECODE, "pp2", 0.5)
        flip(llm, "decode-1", Role.PREFILL, "tp2", 0.5)
        flip(llm, "decode-0", Role.COLOCATED, "tp2", 0.5)
        rounds = load.rounds
        eventually(lambda: load.rounds >= rounds + 2, 240)
    assert not load.wrong
    assert llm.service.recompiles() == 0


@pytest.mark.slow
def test_a_change_that_fails_half_way_leaves_the_worker_what_it_was(monkeypatch):
    def broken(programs: Any) -> list[Any]:
        monkeypatch.undo()
        raise RuntimeError("no room for the program")

    with running("prefill:2xtp1,decode:tp1") as llm:
        monkeypatch.setattr("jdisagg.serve.driver.role_change.compile_cold", broken)
        name = WorkerId("prefill-1")
        config = llm.service.pools.shapes()[name].find("decode", "tp1").config
        llm.service.driver.post(ROUTER, ChangeRole(name, 5, config, 0.0))
        described = llm.service.pools.described
        eventually(lambda: any("no room for the program" in each["why"] for each in described()), 120)
        assert llm.service.driver.actors[name].config.role is Role.PREFILL
        assert answers(llm) == FAMILY.greedy
    assert mesh_executor.compile_cold is not broken
