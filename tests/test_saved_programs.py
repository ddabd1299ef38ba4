"""Programs made ahead: a start finds all of them, and says in one line where they are another's."""

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jdisagg import saved_programs
from jdisagg.core.errors import ConfigError
from jdisagg.core.settings import Settings
from jdisagg.model.checkpoint import read_model
from tests.environment import as_users
from tests.fixtures import conformance

SETTINGS = Settings(mesh="colocated:tp1", max_num_seqs=4)
MODEL, OTHER = read_model(conformance.ROOT / "llama3"), read_model(conformance.ROOT / "qwen2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    saved_programs.write_manifest(tmp_path, "cpu", "cpu:1", SETTINGS, MODEL, 7)
    return tmp_path


def edit(folder: Path, part: str, **values: str) -> None:
    path = folder / saved_programs.MANIFEST
    read = json.loads(path.read_text())
    read[part].update(values)
    path.write_text(json.dumps(read))


def test_what_made_the_programs_here_may_run_them(folder: Path):
    assert saved_programs.fits(str(folder)) and saved_programs.fits(f"only:{folder}")


def test_a_folder_without_programs_made_ahead_is_a_cache_like_any_other(tmp_path: Path):
    assert not saved_programs.fits(str(tmp_path))
    with pytest.raises(ConfigError, match=r"--compile_cache_dir=only:.*: no programs.json there"):
        saved_programs.fits(f"only:{tmp_path}")


def test_programs_of_another_compiler_are_compiled_anew_with_both_versions_in_one_line(
    folder: Path, caplog: pytest.LogCaptureFixture
):
    edit(folder, "made_by", jaxlib="0.1.2")
    with caplog.at_level(logging.WARNING):
        assert not saved_programs.fits(str(folder))
    (record,) = caplog.records
    assert f"jaxlib=0.1.2, this is jaxlib={saved_programs.compiler_versions('cpu')['jaxlib']}" in record.message
    assert record.message.endswith("what differs is compiled here")


def test_a_start_that_may_not_compile_ends_with_both_values_and_what_to_do(folder: Path):
    edit(folder, "made_by", XLA_FLAGS="--xla_other", jax="0.1.1")
    with pytest.raises(ConfigError, match=r"jax=0\.1\.1, this is jax=.*, and 1 more; make them anew by python -m"):
        saved_programs.fits(f"only:{folder}")


def test_programs_of_another_run_are_told_by_the_setting_that_differs(folder: Path):
    only = replace(SETTINGS, compile_cache_dir=f"only:{folder}", model="elsewhere", log_level="info")
    saved_programs.check_settings(only, lambda: MODEL)
    with pytest.raises(ConfigError, match="made by --max_num_seqs=4, this is --max_num_seqs=8;"):
        saved_programs.check_settings(replace(only, max_num_seqs=8), lambda: MODEL)
    saved_programs.check_settings(replace(SETTINGS, compile_cache_dir="auto"), lambda: MODEL)


def test_programs_of_a_model_of_other_numbers_are_refused_with_both_models(folder: Path):
    only = replace(SETTINGS, compile_cache_dir=f"only:{folder}")
    with pytest.raises(ConfigError, match=r"made by --model=llama-\w{12}, this is --model=qwen2-\w{12};"):
        saved_programs.check_settings(only, lambda: OTHER)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"made_by": {}, "settings": {}, "platform": "abacus"}'])
def test_a_list_of_programs_that_cannot_be_read_is_an_error_of_one_line(text: str, tmp_path: Path):
    (tmp_path / saved_programs.MANIFEST).write_text(text)
    with pytest.raises(ConfigError, match="is no list of programs made ahead"):
        saved_programs.fits(str(tmp_path))


@pytest.mark.slow
def test_a_whole_start_compiles_no_program_that_was_made_ahead(tmp_path: Path):
    """What is left are the few that make empty arrays, while weights are loaded."""
    folder, output = tmp_path / "programs", tmp_path / "out.jsonl"
    jobs = tmp_path / "in.jsonl"
    jobs.write_text(json.dumps({"prompt": "def f(x):", "max_tokens": 4}) + "\n")
    flags = [f"--model={conformance.load('llama3').folder}", "--mesh=prefill:tp1,decode:tp1", "--max_model_len=32"]
    flags += ["--max_num_batched_tokens=32", "--short_prompt_tokens=0", "--max_num_seqs=2"]
    env = {key: value for key, value in as_users().items() if not key.startswith("JAX_COMPILATION_CACHE")}

    def ran(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *arguments, *flags],
            capture_output=True,
            text=True,
            check=False,
            env=env,
            timeout=250,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    told = ran("jdisagg", "aot", f"--save={folder}", "--target=cpu:2")
    made = {path.name for path in folder.glob("*-cache")}
    number = json.loads((folder / saved_programs.MANIFEST).read_text())["programs"]
    assert told == f"{number} programs in {folder}: start by --compile_cache_dir={folder}\n"
    ran("jdisagg.launch", f"--compile_cache_dir=only:{folder}", f"--prompts={jobs}", f"--output={output}")
    assert json.loads(output.read_text())["text"]
    found = {path.name for path in folder.glob("*-cache")}
    assert made and len(found - made) <= 6, found - made
    assert not any(name.startswith(("jit__decode", "jit__prefill", "jit_insert", "jit_pack")) for name in found - made)
