"""What runs after the plain install: every command without any extra, absent devices without a traceback."""

import json
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from jdisagg import devices
from jdisagg.__main__ import commands
from jdisagg.command import PIPE_CLOSED
from jdisagg.core.errors import MeshError
from tests.docs.pages import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OF_EXTRAS = (
    "accelerate",
    "compressed_tensors",
    "httpx",
    "hypothesis",
    "matplotlib",
    "nixl",
    "openai",
    "pyarrow",
    "torch",
)
OF_RICH = 1  # its console ends the process with this
PRESCRIBED = ("absl-py", "flax", "grpcio", "jax", "optax", "orbax-checkpoint")
ASKED = """
import contextlib, importlib, io, sys
from jdisagg.__main__ import module_of
without, names = %s
sys.modules.update(dict.fromkeys(without))
for name in names:
    module = importlib.import_module(module_of(name))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert module.main([name, "--help"]) == 0, name
    assert "--config" in said.getvalue(), name
"""


def test_the_prescribed_packages_are_dependencies_of_the_plain_install():
    plain = [each.partition(">")[0].partition("[")[0] for each in PROJECT["dependencies"]]
    assert not [name for name in PRESCRIBED if name not in plain]


def test_every_command_starts_without_the_packages_of_any_extra():
    asked = ASKED % json.dumps([OF_EXTRAS, [*commands()]])
    done = subprocess.run(
        [sys.executable, "-c", asked], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_platform_that_jax_has_no_plugin_for_is_one_line(monkeypatch: pytest.MonkeyPatch):
    def without_plugin():
        raise AssertionError

    monkeypatch.setattr(devices.jax, "devices", without_plugin)
    with pytest.raises(MeshError, match=r"--platform=cpu: no such devices here \(this jax has no plugin for them\)"):
        devices.prepare("cpu", 1)


@pytest.mark.parametrize("words", [["--help"], ["calc", "--help"], ["calc"]], ids=" ".join)
def test_a_reader_that_leaves_ends_a_command_without_a_traceback(words: list[str]):
    command = [sys.executable, "-m", "jdisagg", *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.wait(timeout=60) in (PIPE_CLOSED, OF_RICH) and not process.stderr.read()


def test_the_console_script_is_the_list_of_commands():
    assert PROJECT["scripts"] == {"jdisagg": "jdisagg.__main__:main"}


@pytest.mark.slow
def test_the_wheel_is_small_and_holds_licences_and_data_and_no_model(tmp_path: Path):
    source, made = tmp_path / "source", tmp_path / "made"
    for name in ("jdisagg", "pallas_kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", f"--wheel-dir={made}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    if "No matching distribution" in done.stderr + done.stdout:
        pytest.skip("no package index has the build backend")
    assert done.returncode == 0, done.stderr
    wheel = next(made.glob("*.whl"))
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.stat().st_size < 2_000_000
    assert not [name for name in names if "embedded/" in name or "jdisagg/heads/" in name]
    for wanted in ("LICENSE", "NOTICE", "LICENSE-DistServe", "distserve_a100_80g.json", "page/index.html"):
        assert [name for name in names if name.endswith(wanted)], wanted
