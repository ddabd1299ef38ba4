"""What befalls the process: its disk gets full, its driver dies. It serves on, or it ends so that somebody notices."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.hostile.bystander import TINY, Server, serving, until
from tests.ports import free_port

BROKEN_MODEL = """
import sys
from jdisagg import launch
from jdisagg.core.events import Submit
from jdisagg.policy.router.router import Router

handle = Router.handle

def fails(self, event, now_s):
    if isinstance(event, Submit) and event.request.sampling.max_tokens == 13:
        raise RuntimeError("an invariant of our own does not hold")
    return handle(self, event, now_s)

Router.handle = fails
sys.exit(launch.main(sys.argv))
"""


def ask(url: str, max_tokens: int) -> dict[str, object]:
    body = json.dumps({"prompt": [5, 6, 7], "max_tokens": max_tokens, "temperature": 0}).encode()
    headers = {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url + "/v1/completions", body, headers), timeout=60) as answer:
        return json.loads(answer.read())


def test_a_disk_that_gets_full_under_the_journal_is_not_felt(tmp_path: Path) -> None:
    with serving(tmp_path, (f"--record_dir={tmp_path / 'records'}",)) as server:
        (file,) = (tmp_path / "records").iterdir()
        with server.bystander():
            full = file.stat().st_size + 1000
            resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (full, full))
            time.sleep(1.0)
            assert ask(server.url, 20)["choices"]
        assert file.stat().st_size <= full and file.stat().st_mode & 0o077 == 0
        until(lambda: drops(server).endswith(" 1.0"), "the drop to be counted")


def drops(server: Server) -> str:
    (count,) = [each for each in server.get("/metrics").splitlines() if each.startswith("jdisagg_journal_drops_total")]
    return count


@pytest.mark.hostile
def test_a_driver_that_dies_ends_its_process_with_a_code_and_one_line(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    command = [sys.executable, "-c", BROKEN_MODEL, *TINY, f"--http_port={port}", f"--grpc_port={free_port()}"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    server = Server(process, f"http://127.0.0.1:{port}", "", log)
    try:
        _until_ready(server)
        assert ask(server.url, 12)["choices"]
        with pytest.raises((urllib.error.HTTPError, ConnectionError)):
            ask(server.url, 13)
        began_s = time.monotonic()
        while server.alive and time.monotonic() < began_s + 30:
            try:
                server.get("/live")
            except urllib.error.HTTPError as error:
                assert error.code == 503
            except OSError:
                continue
            else:
                raise AssertionError("/live says that it lives")
        assert process.wait(timeout=30) == 1, server.log()[-2000:]
        assert server.log().splitlines()[-1].startswith("jdisagg: the driver stopped: RuntimeError: an invariant")
        print(f"measured: ended {time.monotonic() - began_s:.1f} s after its driver")
    finally:
        process.kill()


def _until_ready(server: Server) -> None:
    for _ in range(1200):
        assert server.alive, server.log()[-2000:]
        try:
            server.get("/ready")
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("not ready in time")
