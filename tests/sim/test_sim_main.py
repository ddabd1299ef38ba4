"""`python -m jdisagg sim`: a table of latencies, a verdict, the speed, and one line where something is wrong."""

import csv
import json
from pathlib import Path

import pytest

from jdisagg.commands.sim import main


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    path = tmp_path / "azure.csv"
    rows = [f"2023-11-16 18:17:{second:02}.5000000,{100 + 10 * second},{5 + second}" for second in range(12)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]), encoding="utf-8")
    return path


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n500,20\n90,7\n", encoding="utf-8")
    return path


def run(*flags: str) -> int:
    return main(["sim", *flags])


def test_a_recorded_trace_is_simulated_and_told(azure, tmp_path, capsys):
    rows = tmp_path / "requests.csv"
    flags = ["--mesh=prefill:2xtp1,decode:tp1", "--cost=distserve", "--port_gb_per_s=12", f"--csv={rows}", "--rate=2"]
    assert run(f"--trace=azure:{azure}", *flags) == 0
    said = capsys.readouterr().out
    assert "12 of 12 requests served" in said and "attainment 100.0%" in said
    assert "events/s" in said and "x real time" in said and "prefill-1" in said
    assert len(list(csv.DictReader(rows.read_text(encoding="utf-8").splitlines()))) == 12


def test_lengths_are_drawn_from_a_seed(lengths, tmp_path):
    def drawn(seed: int) -> str:
        rows = tmp_path / f"{seed}.csv"
        flags = ("--mesh=colocated:tp2", "--model=llama3-8b", "--requests=9", "--rate=3")
        assert run(f"--trace=lengths:{lengths}", *flags, f"--seed={seed}", f"--csv={rows}") == 0
        return rows.read_text(encoding="utf-8")

    assert drawn(1) == drawn(1) != drawn(2)


def test_an_engine_that_fuses_its_steps_is_simulated_on_measured_kernels(lengths, capsys):
    flags = [
        "--cost=kernels:rtx4090",
        "--kv_tokens=41408",
        "--model=llama3-8b",
        "--mixed_steps=on",
        "--mesh=colocated:tp1",
    ]
    assert run(f"--trace=lengths:{lengths}", "--rate=3", "--requests=8", *flags) == 0
    assert "8 of 8 requests served" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--trace=parquet:x"], "KIND:FILE"),
        (["--trace=lengths:LENGTHS"], "--rate"),
        (["--trace=lengths:LENGTHS", "--rate=1", "--cost=distserve", "--model=llama3-8b"], "opt-13b, opt-66b"),
        (["--trace=lengths:LENGTHS", "--rate=1", "--model=llama3-70b"], "bytes of weights"),
        (["--trace=lengths:LENGTHS", "--rate=1", "--mesh=nothing:1"], "mesh"),
        (
            ["--trace=lengths:LENGTHS", "--rate=1", "--hardware=h100,encode:a100"],
            "'encode:a100' is no CHIP or ROLE:CHIP",
        ),
        (["--trace=azure:/nowhere", "trailing"], "not a flag"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(flags, said, lengths, capsys):
    assert run(*(flag.replace("LENGTHS", str(lengths)) for flag in flags)) == 2
    line = capsys.readouterr().err
    assert said in line and line.startswith("jdisagg sim: ") and line.count("\n") == 1


@pytest.fixture
def turning(tmp_path: Path) -> Path:
    """Long prompts for half a minute, then long answers."""
    path = tmp_path / "turning.csv"
    rows = [f"2023-11-16 18:{n // 240:02}:{n // 4 % 60:02}.{25 * (n % 4):02}00000,1800,20" for n in range(160)]
    rows += [f"2023-11-16 18:{n // 240:02}:{n // 4 % 60:02}.{25 * (n % 4):02}00000,60,300" for n in range(160, 320)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]), encoding="utf-8")
    return path


SCALED = ["--mesh=prefill:tp1,decode:3xtp1", "--cost=distserve", "--rate=6"]


@pytest.mark.parametrize(("autoscale", "flipped"), [("flip", True), ("watch", False)])
def test_an_autoscaler_flips_workers_or_only_tells_and_both_are_said(turning, tmp_path, capsys, autoscale, flipped):
    path = tmp_path / "out.json"
    assert run(f"--trace=azure:{turning}", *SCALED, f"--autoscale={autoscale}", f"--json={path}") == 0
    said = capsys.readouterr().out
    assert "320 of 320 requests served" in said and "the load asks for" in said
    flips = json.loads(path.read_text())["flips"]
    assert bool(flips) is flipped and f"autoscaler: {len(flips)} flips" in said
    assert all(each["role"] == "prefill" and each["worker"].startswith("decode") for each in flips[:1])


def test_flips_between_workers_that_are_cut_otherwise_are_refused_in_one_line(turning, capsys):
    flags = [f"--trace=azure:{turning}", "--mesh=prefill:tp1,decode:pp2", "--cost=distserve", "--rate=2"]
    assert run(*flags, "--autoscale=flip") == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "--autoscale=flip: " in line and "give all workers of --mesh as many devices, without pp" in line


def test_workers_are_lost_and_come_back_and_it_is_said(turning, capsys):
    assert run(f"--trace=azure:{turning}", *SCALED, "--lost_every_s=30", "--noticed_s=1", "--back_s=2") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "workers were lost (" in said
    assert run(f"--trace=azure:{turning}", *SCALED, "--lost_every_s=30", "--autoscale=flip") == 2
    assert "--lost_every_s: who is lost is simulated without --autoscale=flip" in capsys.readouterr().err
