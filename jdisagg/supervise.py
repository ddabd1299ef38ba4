"""`--supervise`: runs the same command as a child process that is restarted whenever it fails.

It uses only the standard library: the parent costs a few megabytes. A clean end, a mistake in the flags (code 2) and
a signal end both. A child that is stopped by a signal for longer than `STOPPED_S` is killed and counts as failed,
since its group has ended without it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

FLAG = "supervise"
MARK = "JDISAGG_IS_SUPERVISED"  # in a child's environment: it never supervises, whatever its flags say
BAD_USE = 2
STOPPED_S = 30.0
TICK_S = 0.1
PR_SET_PDEATHSIG = 1
FIRST_S, LONGEST_S = 1.0, 30.0  # of the pauses between restarts
STEADY_S = 120.0  # a child that ran this long has started well: its next failure counts as the first
MOST = 20  # failures in a row; the last one is final


@dataclass(slots=True)
class RestartPolicy:
    """The pauses between the restarts of one failing process: longer each time, and none after `MOST` failures."""

    failures: int = 0  # in a row

    def pause_s(self, lived_s: float) -> float | None:
        """Returns the seconds to wait before the next start of a process that ran `lived_s`; None to give up."""
        self.failures = 1 if lived_s >= STEADY_S else self.failures + 1
        if self.failures >= MOST:
            return None
        return min(LONGEST_S, FIRST_S * 2.0 ** (self.failures - 1))


def asked(argv: Sequence[str]) -> bool:
    """Returns True if the command line has --supervise; the last one counts, as for other flags."""
    arguments = [each.lstrip("-").lower() for each in argv[1:] if each.startswith("-")]
    arguments = [each for each in arguments if each.partition("=")[0] in (FLAG, f"no{FLAG}")]
    return bool(arguments) and arguments[-1] in (FLAG, f"{FLAG}=true", f"{FLAG}=1")


def run(command: Sequence[str]) -> int:
    """Returns the exit code of the last child of this command, which must not have --supervise."""
    if MARK in os.environ:
        _print("this process is supervised already: leave --supervise to the first")
        return BAD_USE
    restarts, stopping = RestartPolicy(), list[int]()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stopping.append(number))
    while True:
        began_s = time.monotonic()
        code = _run_child(command, stopping)
        if code in (0, BAD_USE) or stopping:
            return code
        pause_s = restarts.pause_s(time.monotonic() - began_s)
        if pause_s is None:
            _print(f"ended with code {code}, {restarts.failures} times in a row: given up")
            return code
        _print(f"ended with code {code}; it is started again in {pause_s:g} s")
        until_s = time.monotonic() + pause_s
        while time.monotonic() < until_s and not stopping:
            time.sleep(TICK_S)
        if stopping:
            return code


def child_of(argv: Sequence[str]) -> list[str]:
    """Returns this command as a child that does not supervise, whatever its file or environment say."""
    command = [sys.executable, "-m", "jdisagg.launch", *argv[1:], f"--no{FLAG}"]
    assert not asked(command[2:]), "a child that supervised a child, and so on, would fill the machine"
    return command


def _run_child(command: Sequence[str], stopping: list[int]) -> int:
    """Runs one child from its start to its end, and passes signals on. The child has a session of its own, so that
    Ctrl-C in a terminal reaches it once."""
    environment = {**os.environ, MARK: "1"}
    child = subprocess.Popen(command, start_new_session=True, env=environment, preexec_fn=_end_with_parent)  # noqa: PLW1509
    passed_on, stopped_s = 0, None
    while (code := child.poll()) is None:
        for number in stopping[passed_on:]:
            passed_on += 1
            child.send_signal(number)
        now_s = time.monotonic()
        stopped_s = (stopped_s or now_s) if _is_stopped(child.pid) else None
        if stopped_s is not None and now_s - stopped_s > STOPPED_S:
            _print(f"process {child.pid} was stopped for {STOPPED_S:g} s: killed")
            child.kill()
        time.sleep(TICK_S)
    return 128 - code if code < 0 else code


def _end_with_parent() -> None:
    """Makes the child end when its supervisor is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _is_stopped(pid: int) -> bool:
    """Returns True if a signal has stopped the process, on Linux; False elsewhere."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):
        return False


def _print(what: str) -> None:
    os.write(2, f"jdisagg: supervise: {what}\n".encode())
