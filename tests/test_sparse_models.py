"""Commands that count, asked about models with experts or latents of which there is nothing but the config.json."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from jdisagg.commands import aot, calc, plan
from jdisagg.commands.sim import main as sim
from tests.fixtures.published_configs import PUBLISHED

LATENT = ("deepseek-v2", "deepseek-v3")
DEVICES = {"mixtral-8x7b": 2, "qwen3-30b-a3b": 1, "deepseek-v2": 8, "deepseek-v3": 32, "gpt-oss-20b": 1}


@pytest.fixture(params=PUBLISHED)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return PUBLISHED[request.param].folder(tmp_path / request.param)


def devices_of(folder: Path) -> int:
    """H200s that hold the weights in bfloat16."""
    return DEVICES.get(folder.name, 4)


def numbers(pattern: str, said: str) -> list[float]:
    found = re.search(pattern, said)
    assert found is not None, said
    return [float(each) for each in found.groups()]


def test_the_calculator_tells_weights_active_ones_and_bytes_of_a_token(folder: Path, capsys):
    assert calc.main(["calc", f"--model={folder}", "--tokens=4096"]) == 0
    said, published = capsys.readouterr().out, PUBLISHED[folder.name]
    active, weights = numbers(r"([\d.]+) B of ([\d.]+) B weights act on a token", said)
    assert weights == pytest.approx(published.weights, rel=5e-3) and active == pytest.approx(published.active, rel=0.2)
    token_bytes = published.config["num_hidden_layers"] * published.kv_numbers * 2
    assert f"{calc.decimal(token_bytes)} = {calc.binary(token_bytes)} of KV a token" in said
    assert ("MLA" in said) == (folder.name in LATENT)
    one, *more = numbers(r"expected to read " + ", ".join([r"([\d.]+) B"] * 4), said)
    assert one <= active and sorted(more) == more and more[-1] > 0.9 * weights - 2, "512 tokens hit nearly all"


def test_the_calculator_says_nothing_of_experts_where_there_are_none(capsys):
    assert calc.main(["calc", "--model=llama3-8b", "--tokens=64"]) == 0
    said = capsys.readouterr().out
    assert "131.1 KB = 128 KiB of KV a token" in said and "experts" not in said and "weights" not in said


def test_a_workload_is_simulated(folder: Path, tmp_path: Path, capsys):
    tp, found = devices_of(folder), tmp_path / "found.json"
    asked = ["--trace=mix:2000+40", "--rate=0.5", "--requests=20", "--hardware=h200", f"--json={found}"]
    assert sim(["sim", f"--model={folder}", f"--mesh=prefill:tp{tp},decode:tp{tp}", *asked, "--port_gb_per_s=50"]) == 0
    assert "20 of 20 requests served" in capsys.readouterr().out
    assert json.loads(found.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v3"])
def test_a_pair_of_pools_is_planned(name: str, tmp_path: Path, capsys):
    folder = PUBLISHED[name].folder(tmp_path / name)
    devices = devices_of(folder)
    shape = [f"--devices={2 * devices}", f"--tps={devices}", "--pps=1", "--chunks=2048", "--transfers=chunk"]
    asked = ["--trace=mix:8000+4", "--rate=1", "--hardware=h200", "--slo_ttft_s=3", "--slo_tpot_s=0.2", "--most=1"]
    assert plan.main(["plan", f"--model={folder}", *shape, *asked, "--seeds=1", "--nosensitivity"]) == 0
    assert "disaggregate" in capsys.readouterr().out


def test_bounds_are_told_without_a_simulation(folder: Path, capsys):
    shape = [f"--devices={2 * devices_of(folder)}", "--tps=1,4,8,32", "--hardware=h200"]
    asked = ["--trace=mix:2000+100", "--rate=1", "--slo_ttft_s=3", "--slo_tpot_s=0.2"]
    assert plan.main(["plan", f"--model={folder}", *shape, *asked, "--quick"]) == 0
    assert "upper bounds" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "gib"), [("deepseek-v3", "1250"), ("mixtral-8x7b", "86")])
def test_weights_that_a_chip_has_no_room_for_are_told_before_anything_is_compiled(
    name: str, gib: str, tmp_path, capsys
):
    folder = PUBLISHED[name].folder(tmp_path / name)
    asked = ["--mesh=colocated:tp1", "--target=v5e:1x1", "--dtype=bfloat16", "--max_model_len=4096"]
    assert aot.main(["aot", f"--model={folder}", *asked]) == 1
    assert re.search(rf"does not fit: {gib}[\d.]* GiB of weights", capsys.readouterr().err)
