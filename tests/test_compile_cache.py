"""Compiled programs are kept between starts: where, for whom, and what a damaged entry costs."""

import json
import os
import re
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest

from jdisagg import devices
from tests.environment import as_users
from tests.fixtures import conformance

CLEAN = {key: value for key, value in as_users().items() if not key.startswith("JAX_COMPILATION_CACHE")}


def use(setting: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = f"from jdisagg import devices; print(devices.use({setting!r}))"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**CLEAN, **environment}, check=False
    )


def test_programs_are_kept_in_the_users_cache_folder_one_folder_a_machine(tmp_path: Path):
    done = use("auto", XDG_CACHE_HOME=str(tmp_path))
    folder = Path(done.stdout.strip())
    assert folder.parent == tmp_path / "jdisagg" / "compiled" and folder.name == devices.machine_name()
    assert folder.stat().st_mode & 0o077 == 0 and not list(folder.iterdir())
    assert str(tmp_path / ".cache" / "jdisagg") in use("auto", XDG_CACHE_HOME="not/absolute", HOME=str(tmp_path)).stdout


def test_off_means_none_and_what_jax_was_told_counts(tmp_path: Path):
    assert use("off", XDG_CACHE_HOME=str(tmp_path)).stdout == "None\n" and not list(tmp_path.iterdir())
    assert use("auto", JAX_COMPILATION_CACHE_DIR=str(tmp_path)).stdout == f"{tmp_path}\n"


def test_a_folder_that_cannot_be_used_is_a_warning_where_nobody_asked_for_it_and_else_an_error(tmp_path: Path):
    silent = use("auto", XDG_CACHE_HOME="/dev/null")
    assert silent.stdout == "None\n" and "not kept for the next start: Not a directory" in silent.stderr
    asked = use("/dev/null/programs")
    assert asked.returncode == 1 and "ConfigError: --compile_cache_dir=/dev/null/programs: Not a dir" in asked.stderr
    (tmp_path / devices.machine_name()).mkdir(mode=0o777)
    (tmp_path / devices.machine_name()).chmod(0o777)
    open_to_all = use(str(tmp_path))
    assert open_to_all.returncode == 1 and "others may write programs into" in open_to_all.stderr


def test_entries_cut_off_and_the_oldest_beyond_the_limit_are_removed(tmp_path: Path):
    whole = zlib.compress(os.urandom(1000))
    contents = {"old": whole, "cut": whole[:500], "empty": b"", "other": b"no zlib", "new": whole}
    for age, (name, content) in enumerate(reversed(contents.items())):
        path = tmp_path / "machine" / f"{name}-cache"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        os.utime(path, (time.time() - age, time.time() - age))
    devices.sweep(tmp_path, 10_000)
    assert {path.name for path in tmp_path.rglob("*-cache")} == {"old-cache", "other-cache", "new-cache"}
    devices.sweep(tmp_path, 1500)
    assert {path.name for path in tmp_path.rglob("*-cache")} == {"other-cache", "new-cache"}


def test_only_what_was_written_since_the_last_sweep_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, read = tmp_path / "machine" / "a-cache", list[str]()
    path.parent.mkdir()
    monkeypatch.setattr(devices, "_is_whole", lambda path: read.append(path.name) or True)
    path.write_bytes(b"x")
    devices.sweep(tmp_path, 10_000)
    os.utime(path, (time.time() - 3600, time.time() - 3600))
    devices.sweep(tmp_path, 10_000)
    assert read == ["a-cache"]
    path.write_bytes(b"y")
    devices.sweep(tmp_path, 10_000)
    assert read == ["a-cache", "a-cache"]


def start(cache: Path) -> tuple[list[str], float]:
    """What a new process answers, and the seconds until it ended."""
    jobs, output = cache.parent / "in.jsonl", cache.parent / f"out-{time.time_ns()}.jsonl"
    prompts = ["def f(x):", "import os", "x = 1"]
    jobs.write_text("".join(json.dumps({"prompt": prompt, "max_tokens": 12}) + "\n" for prompt in prompts))
    flags = [f"--model={conformance.load('llama3').folder}", "--mesh=prefill:tp2,decode:pp2", "--max_model_len=64"]
    flags += [
        "--max_num_batched_tokens=64",
        "--short_prompt_tokens=0",
        f"--compile_cache_dir={cache}",
        f"--prompts={jobs}",
        f"--output={output}",
    ]
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "jdisagg.launch", *flags], capture_output=True, text=True, check=False,
        env=CLEAN, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0 and not re.search("[Ee]rror|[Ww]arn", done.stderr), done.stderr
    rows = sorted(map(json.loads, output.read_text().splitlines()), key=lambda row: row["line"])
    return [row["text"] for row in rows], time.monotonic() - began_s


@pytest.mark.slow
def test_a_second_start_finds_every_program_and_answers_the_same_and_damage_costs_only_time(tmp_path: Path):
    cache = tmp_path / "compiled"
    first, first_s = start(cache)
    entries = {path: path.stat().st_mtime_ns for path in cache.rglob("*-cache")}
    second, second_s = start(cache)
    print(f"first start {first_s:.1f} s, second {second_s:.1f} s, {len(entries)} programs")
    assert second == first and len(entries) > 5 and second_s < first_s
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*-cache")} == entries, "something was compiled again"
    for path, damage in zip(sorted(entries, key=lambda path: entries[path])[-2:], (0, 200), strict=True):
        path.write_bytes(path.read_bytes()[:damage])
    assert start(cache)[0] == first
