"""Ctrl-C and SIGTERM at each phase of a start: one line, a code that is not 0, at once, and never a crash."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.environment import as_users
from tests.fixtures import conformance

SMALL = (
    f"--model={conformance.ROOT / 'llama3'}",
    "--max_model_len=256",
    "--max_num_batched_tokens=64",
    "--max_num_seqs=4",
    "--mesh=colocated:tp1",
    "--http_port=0",
    "--grpc_port=0",
)
PROMPT_S = 20.0  # by far enough to end, on a machine that is busy
PHASES_S = (0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)


def start(*flags: str) -> subprocess.Popen[str]:
    environment = as_users(JAX_ENABLE_COMPILATION_CACHE="false")  # warm-up is long
    command = [sys.executable, "-m", "jdisagg.launch", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def end_by(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Sends the signal and asserts how the process ends."""
    began_s = time.monotonic()
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 128 + number, f"{process.returncode}: {told[-2000:]}"
    assert told == "jdisagg: interrupted while starting\n"
    assert time.monotonic() - began_s < PROMPT_S


def await_jaxlib(process: subprocess.Popen[str]) -> None:
    """Until it is among the imports: jaxlib's library is loaded, and much else comes after it."""
    end_s = time.monotonic() + 60
    while "/jaxlib/" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None and time.monotonic() < end_s, "it never came to jaxlib"
        time.sleep(0.002)


def await_banner(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], 60)[0], "no word in a minute"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_among_the_imports_is_one_line(number: signal.Signals) -> None:
    process = start(*SMALL)
    await_jaxlib(process)
    end_by(process, number)


def test_a_signal_in_the_warm_up_is_one_line() -> None:
    process = start(*SMALL)
    await_banner(process)
    time.sleep(0.5)
    end_by(process, signal.SIGINT)


@pytest.mark.hostile
@pytest.mark.parametrize("after_s", PHASES_S)
def test_a_signal_at_any_moment_of_the_start_is_one_line(after_s: float) -> None:
    process = start(*SMALL)
    time.sleep(after_s)
    end_by(process, signal.SIGINT)


@pytest.mark.hostile
@pytest.mark.parametrize("after_s", [1.0, 4.0, 6.0])
@pytest.mark.parametrize("role", ["router", "decode"])
def test_a_signal_while_a_role_of_a_cluster_starts_is_one_line(role: str, after_s: float, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("sixteen bytes of secret, or more")
    more = ("--control_port=0",) if role == "router" else ("--router=127.0.0.1:1",)
    process = start(*SMALL[:-3], "--mesh=prefill:tp1,decode:tp1", f"--role={role}", f"--secret_file={secret}", *more)
    time.sleep(after_s)
    if process.poll() is None and not _ready(process):
        end_by(process, signal.SIGINT)
    process.kill()
    process.communicate()


def _ready(process: subprocess.Popen[str]) -> bool:
    """Whether it has said so: then a signal means to drain."""
    assert process.stdout is not None
    told = b""
    while select.select([process.stdout], [], [], 0)[0] and (piece := os.read(process.stdout.fileno(), 4096)):
        told += piece
    return b"ready" in told or b"workers join" in told
