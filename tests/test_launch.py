"""The launcher as a user meets it: a process, its exit code, its lines, its signals."""

import asyncio
import io
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest
from rich.console import Console

from jdisagg.core.request import FinishReason
from jdisagg.core.settings import Settings
from jdisagg.terminal import complete_one
from tests.environment import quick
from tests.fixtures import conformance
from tests.launched import launch_here
from tests.ports import free_port
from tests.serve.scripted import ScriptedService, tokens

MODEL = conformance.load("llama3").folder
SMALL = [
    f"--model={MODEL}",
    "--max_model_len=256",
    "--max_num_batched_tokens=64",
    "--max_num_seqs=4",
    "--mesh=colocated:tp1",
]


def launch(*arguments, timeout_s=280):
    command = [sys.executable, "-m", "jdisagg.launch", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=quick(), check=False)


@pytest.fixture(scope="module")
def busy_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


MISTAKES = [
    (["--model=/nowhere", "--http_port=0", "--grpc_port=0"], "--model=/nowhere: there is no config.json"),
    (["--prompts=pyproject.toml", "--output=pyproject.toml"], "pyproject.toml, line 1: not an object"),
    (["--mehs=colocated:tp1"], "unknown flag --mehs; did you mean --mesh?"),
    (["--prompts=/nowhere.jsonl", "--output=/tmp/never.jsonl"], "/nowhere.jsonl: there is no such file"),
    (["--prompts=/", "--output=/tmp/never.jsonl"], "--prompts=/: "),
    (["--prompts=/dev/null", "--output=README.md"], "--output=README.md: line 1 is not an answer"),
    (["--prompts=/dev/null", "--output=/dev/stdout"], "--output=/dev/stdout: is a link to"),
    (["--prompts=/dev/null", "--output=/nowhere/out.jsonl"], "--output=/nowhere/out.jsonl: No such file"),
]
FIRST = [
    (["--mesh=prefil:tp2,decode:pp2"], "unknown role 'prefil'"),
    (["--mesh=prefill:tp1,decode:pp9", "--http_port=0", "--grpc_port=0"], "9 stages (pp) for 6 layers"),
    (["--mesh=colocated:tp1@9999", "--http_port=0", "--grpc_port=0"], "devices 0 to 9999, this machine has 256"),
]  # of a process: the last two ask for devices of its own


@pytest.mark.parametrize(
    ("start", "arguments", "says"),
    [(launch_here, *each) for each in MISTAKES] + [(launch, *each) for each in FIRST],
)
def test_a_mistake_is_one_line_and_exit_code_2(start, arguments, says):
    done = start(*arguments)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_port_in_use_is_found_before_anything_is_loaded(busy_port):
    done = launch_here(f"--http_port={busy_port}")
    assert done.returncode == 2
    assert f"--http_port={busy_port}" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("role", "flag"),
    [
        ("router", "--control_port={}"),
        ("decode", "--kv_listen=127.0.0.1:{}"),
        ("router,prefill", "--kv_listen=[::1]:{}"),
    ],
)
def test_a_cluster_port_in_use_is_found_before_anything_is_loaded(busy_port, tmp_path, role, flag):
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("sixteen bytes of secret, or more")
    port = busy_port if "::1" not in flag else "99999"
    more = ["--http_port=0", "--grpc_port=0", "--control_port=0"] if "router" in role else ["--router=127.0.0.1:1"]
    done = launch_here(f"--role={role}", f"--secret_file={secret}", *more, flag.format(port))
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert str(port) in done.stderr and "Traceback" not in done.stderr and not done.stdout


@pytest.mark.parametrize("argument", ["--record_dir=/dev/null/journals", "--metrics_compat=graphite"])
def test_what_cannot_be_recorded_is_said_before_anything_is_compiled(argument):
    done = launch_here(*SMALL, "--http_port=0", "--grpc_port=0", argument)
    assert done.returncode == 2
    assert argument.partition("=")[2] in done.stderr and "Traceback" not in done.stderr
    assert "ready" not in done.stdout, "the programs were compiled first"


@pytest.mark.slow
def test_one_prompt_prints_its_completion_and_a_ledger_whose_parts_sum_to_the_whole():
    done = launch(*SMALL[:-1], "--mesh=prefill:tp2,decode:pp2", "--prompt=def f(x):", "--raw_prompt", "--max_tokens=8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("def f(x):")
    for part in ("queue", "reserve_wait", "prefill", "transfer", "first_step", "decode", "whole"):
        assert part in done.stderr
    assert "prefill-0" in done.stderr and "KV pages, shard by shard" in done.stderr
    assert "share device" not in done.stderr


def test_one_prompt_whose_answer_ends_as_an_error_is_no_success(capsys):
    broken = ScriptedService(lambda request: tokens(request, [5, 6], FinishReason.ERROR))
    whole = ScriptedService(lambda request: tokens(request, [5, 6]))
    settings, console = Settings(prompt="x"), Console(file=io.StringIO())
    assert asyncio.run(complete_one(whole, settings, console)) == 0
    assert asyncio.run(complete_one(broken, settings, console)) == 1
    assert capsys.readouterr().err.startswith("jdisagg: the answer ended early: ")


@pytest.mark.slow
def test_meshes_on_the_same_devices_give_the_same_text_and_a_warning():
    texts, prompt = [], ["--prompt=def f(x):", "--raw_prompt", "--max_tokens=24"]
    for mesh in ("prefill:tp2,decode:pp2", "prefill:tp2@0,decode:pp2@0"):
        done = launch(*SMALL[:-1], f"--mesh={mesh}", *prompt)
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout)
    assert texts[0] == texts[1] and len(texts[0]) > len("def f(x):") + 5
    shared = "prefill-0 and decode-0 share devices 0, 1: for testing only"
    assert f"warning  {shared}" in done.stderr and done.stderr.count(shared) == 2, "once in the banner, once in the log"
    assert "on 2 cpu devices" in done.stderr


@pytest.mark.slow
def test_a_batch_is_resumed_where_it_stopped(tmp_path):
    prompts, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"x = {i}", "max_tokens": 3}) + "\n" for i in range(5)))
    kept = json.dumps({"line": 2, "text": "kept from before"})
    output.write_text(kept + "\n" + '{"line": 3, "te')  # a crash cut the second line off
    done = launch(*SMALL, f"--prompts={prompts}", f"--output={output}")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert sorted(row["line"] for row in rows) == [0, 1, 2, 3, 4]
    assert kept in output.read_text()
    assert all(row["usage"]["completion_tokens"] <= 3 for row in rows if row["line"] != 2)


@contextmanager
def running(*arguments):
    """A server process and its base URL, once it is ready."""
    port = free_port()
    command = [sys.executable, "-m", "jdisagg.launch", *SMALL, f"--http_port={port}", "--grpc_port=-1", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=quick())
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: status(f"{url}/ready") == 200 or process.poll() is not None, 240)
        assert process.poll() is None, process.communicate()[0]
        yield process, url
    finally:
        process.kill()
        process.communicate()


def wait_until(true, limit_s):
    end_s = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.05)


def status(url, body=None):
    data = json.dumps(body).encode() if body else None
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def long_request(url):
    """Starts an answer of many tokens and returns once the first has come: (response, what was read)."""
    body = {"model": "llama3", "prompt": "x", "max_tokens": 200, "stream": True, "ignore_eos": True}
    answer = urllib.request.urlopen(
        urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode()), timeout=60
    )
    return answer, answer.readline()


@pytest.mark.slow
def test_a_signal_drains_and_a_second_one_stops_at_once():
    with running() as (process, url):
        answer, first = long_request(url)
        assert first.startswith(b"data: ")
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: status(f"{url}/ready") in (503, None), 60)
        rest = answer.read()
        assert b"[DONE]" in rest and b'"finish_reason":"length"' in rest
        assert process.wait(timeout=60) == 0


@pytest.mark.slow
def test_a_second_signal_does_not_wait_for_running_requests():
    with running("--drain_s=600") as (process, url):
        long_request(url)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        wait_until(lambda: process.poll() is not None, 60)
        assert process.returncode in (0, 130)


def test_printed_settings_come_from_flags_and_file():
    done = launch_here("--config=configs/pod_70b.toml", "--page_size=128", "--print_config")
    assert done.returncode == 0
    assert "page_size = 128" in done.stdout and 'mesh = "prefill:tp8,decode:pp4tp2"' in done.stdout


def test_help_is_short_and_grouped():
    done = launch("--help")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) < 100 and "cluster:" in done.stdout
    assert "--lease_s=" not in done.stdout and "--lease_s" in done.stdout


def test_helpfull_explains_every_setting():
    done = launch("--helpfull")
    assert done.returncode == 0 and "\n  --lease_s=15.0 " in done.stdout and "also:" not in done.stdout
