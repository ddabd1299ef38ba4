"""--supervise: what ended by a failure is started again, what ended as it was asked to is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jdisagg import supervise
from jdisagg.supervise import LONGEST_S, MOST, STEADY_S, RestartPolicy
from tests.serve.cluster.processes import until

PARENT = (
    "import sys; from jdisagg import supervise; supervise.STOPPED_S = 1.0;"
    "sys.exit(supervise.run([sys.executable, *sys.argv[1:]]))"
)
COUNTING = "import sys, pathlib; p = pathlib.Path(sys.argv[1]); n = len(p.read_text()); p.write_text('x' * (n + 1));"


def supervised(code: str, count: Path) -> subprocess.Popen[str]:
    count.write_text("")
    command = [sys.executable, "-c", PARENT, "-c", COUNTING + code, str(count)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_a_failure_is_started_again_until_it_ends_well(tmp_path: Path):
    count = tmp_path / "count"
    parent = supervised("sys.exit(0 if n else 1)", count)
    said = parent.communicate(timeout=60)[1]
    assert parent.returncode == 0 and len(count.read_text()) == 2
    assert said == "jdisagg: supervise: ended with code 1; it is started again in 1 s\n"


@pytest.mark.parametrize("code", [0, 2])
def test_a_clean_end_and_a_mistake_in_the_flags_are_final(code: int, tmp_path: Path):
    count = tmp_path / "count"
    parent = supervised(f"sys.exit({code})", count)
    assert parent.communicate(timeout=60)[1] == ""
    assert parent.returncode == code and len(count.read_text()) == 1


def test_a_signal_goes_on_to_the_child_and_ends_both(tmp_path: Path):
    count = tmp_path / "count"
    wait = (
        "import signal, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); p.write_text('up'); time.sleep(60)"
    )
    parent = supervised(wait, count)
    until(lambda: count.read_text() == "up", "the child", 60)
    parent.send_signal(signal.SIGTERM)
    parent.communicate(timeout=60)
    assert parent.returncode == 7 and count.read_text() == "up"


def test_a_child_that_was_killed_or_stands_stopped_is_started_again(tmp_path: Path):
    count = tmp_path / "count"
    last = "import os, time; sys.exit(0) if n == 2 else None; p.with_suffix(f'.{n}').write_text(str(os.getpid()));"
    parent = supervised(last + "time.sleep(120)", count)
    for number, sent in enumerate((signal.SIGKILL, signal.SIGSTOP)):
        file = count.with_suffix(f".{number}")
        pid = until(lambda file=file: file.exists() and file.read_text(), "a child", 60)
        os.kill(int(pid), sent)
    said = parent.communicate(timeout=60)[1]
    assert parent.returncode == 0 and said.count("ended with code 137") == 2 and "was stopped for 1 s: killed" in said


def test_a_supervisor_that_is_killed_leaves_nobody_behind(tmp_path: Path):
    count = tmp_path / "count"
    parent = supervised("import os, time; p.write_text(str(os.getpid())); time.sleep(120)", count)
    pid = until(lambda: len(count.read_text()) > 1 and count.read_text(), "a child", 60)
    assert Path(f"/proc/{pid}").exists()
    parent.kill()
    parent.communicate(timeout=60)
    assert until(lambda: not Path(f"/proc/{pid}").exists(), "the child to end", 60)


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # of JAX, which this process has loaded
def test_what_always_fails_is_given_up_with_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(supervise.RestartPolicy, "pause_s", lambda restarts, lived_s: None)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        assert supervise.run([sys.executable, "-c", "import sys; sys.exit(9)"]) == 9
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)


def test_the_child_is_the_same_command_that_supervises_nothing():
    argv = ["launch", "--supervise", "--role=decode"]
    assert supervise.asked(argv) and not supervise.asked(["launch", "--role=decode", "--nosupervise"])
    assert supervise.child_of(argv) == [
        sys.executable, "-m", "jdisagg.launch", "--supervise", "--role=decode", "--nosupervise",
    ]  # fmt: skip
    assert not supervise.asked(supervise.child_of(argv)[2:])  # else every child would have a child of its own
    began_s = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-m", "jdisagg.launch", "--supervise", "--page_size=-1"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2 and "--page_size is -1" in ended.stderr and time.monotonic() - began_s < 120


def test_a_child_supervises_nothing_whatever_it_is_told(tmp_path: Path):
    count = tmp_path / "count"
    again = "from jdisagg import supervise; sys.exit(supervise.run([sys.executable, '-c', 'raise SystemExit(1)']))"
    parent = supervised(again, count)
    assert "this process is supervised already" in parent.communicate(timeout=60)[1]
    assert parent.returncode == 2 and len(count.read_text()) == 1


def test_pauses_grow_to_the_longest_and_end() -> None:
    restarts = RestartPolicy()
    pauses = [restarts.pause_s(1.0) for _ in range(MOST)]
    assert pauses[:6] == [1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_S] and set(pauses[5:-1]) == {LONGEST_S}
    assert pauses[-1] is None


def test_who_lived_long_starts_anew_at_once() -> None:
    restarts = RestartPolicy()
    for _ in range(MOST - 1):
        restarts.pause_s(1.0)
    assert restarts.pause_s(STEADY_S) == 1.0 and restarts.pause_s(1.0) == 2.0
