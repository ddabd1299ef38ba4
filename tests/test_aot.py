"""`python -m jdisagg aot` as a user meets it: exit codes, one-line mistakes, the report."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from jdisagg.commands import aot
from jdisagg.parallel.topology import devices_of
from tests.environment import as_users

EXPECTED = " is expected to take "
ROOT = Path(__file__).parent.parent
POD = ["--model=configs/llama3_70b", "--mesh=prefill:tp8,decode:pp4tp2"]
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_hidden_layers": 2,
    "vocab_size": 512,
}
pytestmark = pytest.mark.usefixtures("no_kept_programs")
CUDA = find_spec("jax_plugins") and any(find_spec(f"jax_plugins.{each}") for each in ("xla_cuda13", "xla_cuda12"))
needs_cuda = pytest.mark.skipif(not CUDA, reason="pip install 'jdisagg[aot-gpu]'")
needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="pip install 'jdisagg[aot-tpu]'")


@pytest.fixture
def run(capsys, monkeypatch):
    """(exit code, stdout, stderr) of the command, in this process."""
    monkeypatch.chdir(ROOT)

    def run(*arguments):
        code = aot.main(["jdisagg aot", *arguments])
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (POD, "needed: --target=CHIP:SIDES"),
        ([*POD, "--target=v5p"], "cannot read target 'v5p'"),
        ([*POD, "--target=v9:2x2"], "unknown chip 'v9'"),
        ([*POD, "--target=v5p:2x2x2"], "needs 16 devices, v5p:2x2x2 has 8"),
        ([*POD, "--target=v5p:2x2x4", "--max-model-len=9000"], "--max_model_len=9000 is over the model's 8192"),
        (["--model=/nowhere", "--target=v5e:2x2"], "--model=/nowhere: there is no config.json"),
        (["--target=v5e:2x2", "--mehs=colocated:tp1"], "unknown flag --mehs; did you mean --mesh?"),
        (["--target=v5e:2x2", "--context_tokens=0"], "context_tokens"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(run, arguments, says):
    code, _, stderr = run(*arguments)
    assert code == 2, stderr
    (line,) = stderr.splitlines()
    assert line.startswith("jdisagg aot: ") and says in line


def test_a_model_that_does_not_fit_says_the_numbers_before_anything_is_compiled(run):
    code, _, stderr = run(*POD, "--target=v5e:4x4")
    assert code == 1, stderr
    (line,) = stderr.splitlines()
    assert "prefill-0 does not fit: 18.14 GiB of weights on a device with 15.75 GiB" in line, line


def report_of(folder, *arguments):
    """The finished process, in a Python of its own, and its report."""
    (folder / "config.json").write_text(json.dumps(TINY))
    report = folder / "report.json"
    command = [sys.executable, "-m", "jdisagg", "aot", f"--model={folder}", f"--json={report}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT, env=as_users(), check=False)
    assert report.exists(), done.stdout + done.stderr
    return done, json.loads(report.read_text())


@needs_libtpu
@pytest.mark.slow
def test_a_whole_run_is_compiled_and_reported(tmp_path):
    sizes = "--kv_tokens=8192", "--max_num_batched_tokens=64"
    done, report = report_of(tmp_path, "--mesh=prefill:tp2,decode:pp2", "--target=v5e:2x2", *sizes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert report["faults"] == [] and "fits" in done.stdout
    assert report["kv_tokens"] == {"prefill-0": 8192, "decode-0": 8192}
    kinds = {each["kind"] for each in report["programs"]}
    assert {"prefill", "head", "score", "decode", "draw", "pack", "insert"} <= kinds
    decode = next(each for each in report["programs"] if each["kind"] == "decode")
    assert decode["aliased_bytes"] >= decode["donated_bytes"] > 0 and decode["floor_s"] > 0
    assert all(stage["total_bytes"] < stage["limit_bytes"] for stage in report["stages"])
    sent = [each for each in report["floors"] if " sends " in each]
    assert len(sent) == 1 and sent[0].startswith("prefill-0"), "stages of one device send nothing within a program"
    told = [each for each in report["floors"] if EXPECTED in each]
    assert len(report["floors"]) == 2 + len(sent) + len(told)
    assert {each.partition(":")[0] for each in told} == {"prefill-0", "decode-0"}


@needs_cuda
@pytest.mark.slow
def test_groups_over_hosts_are_compiled_and_what_they_send_is_told(tmp_path):
    """Prefill TP over four devices of two hosts, and a ring of two stages of two, each on a host of its own."""
    sizes = "--kv_tokens=8192", "--max_num_batched_tokens=64", "--multi_step=4", "--max_num_seqs=8"
    done, report = report_of(tmp_path, "--mesh=prefill:tp4,decode:ring2tp2", "--target=h100:4x2", *sizes)
    assert done.returncode == 0, done.stdout + done.stderr
    told = [each for each in report["floors"] if EXPECTED in each]
    assert report["faults"] == [] and len(report["floors"]) == 4 + len(told)
    assert {each.partition(":")[0] for each in told} == {"prefill-0", "decode-0"}
    by_kind = {each["kind"]: each for each in report["programs"]}
    for kind in ("prefill", "ring plain"):
        sent = by_kind[kind]["sent_bytes"]
        assert sent["inside"] > 0 and sent["between"] > 0, kind
        assert by_kind[kind]["links_s"] > 0 and by_kind[kind]["floor_s"] > 0
    assert by_kind["ring plain"]["collectives"]["collective-permute"] == 1
    (ring,) = [each for each in report["stages"] if each["worker"] == "decode-0"]
    assert ring["num_devices"] == 4 and ring["total_bytes"] < ring["limit_bytes"]
    assert "MiB to other hosts, at least" in done.stdout and "in a dispatch of 9 ticks, 4 at each of 2" in done.stdout


@needs_libtpu
@pytest.mark.slow
def test_pages_that_are_more_than_the_memory_are_a_fault_with_both_numbers(tmp_path):
    sizes = "--kv_tokens=9000000", "--max_num_batched_tokens=64"
    done, report = report_of(tmp_path, "--mesh=colocated:tp1", "--target=v5e:1x1", *sizes)
    assert done.returncode == 1, done.stdout + done.stderr
    assert any("does not fit: 17." in fault and "of 15.75 GiB a device" in fault for fault in report["faults"])


def test_a_compiler_that_is_not_installed_is_named_with_the_extra_that_brings_it(run, monkeypatch):
    """Nothing is to be found on an empty path."""
    devices_of.cache_clear()
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "libtpu", raising=False)
    monkeypatch.setattr(sys, "path_importer_cache", {})
    code, _, stderr = run("--target=v5e:2x2")
    assert code == 2
    assert stderr == "jdisagg aot: the compiler for v5e is not installed: pip install -e '.[aot-tpu]' in the source\n"
