"""`python -m jdisagg plan`: a recommendation in words, a file that launch takes, and one line where nothing goes."""

from pathlib import Path

import pytest

from jdisagg import flags
from jdisagg.commands import plan
from jdisagg.commands.plan import main
from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.core.worker_config import Role
from jdisagg.launch import main as launch

FAST = ("--model=llama3-8b", "--hardware=a100", "--seeds=1", "--chunks=2048", "--tps=1", "--pps=1", "--transfers=chunk")


def run(*given: str) -> int:
    return main(["plan", *FAST, *given])


def test_the_file_of_a_plan_starts_a_launch(tmp_path: Path, capsys):
    path = tmp_path / "plan.toml"
    asked = (
        "--devices=2",
        "--trace=mix:3000+4",
        "--rate=2",
        "--nosensitivity",
        "--slo_tpot_s=0.2",
        "--checkpoint=/70b",
        "--emit=slurm,compose",
        "--job_name=small",
        f"--job_folder={tmp_path / 'job'}",
    )
    assert run(*asked, f"--output={path}") == 0
    said = capsys.readouterr().out
    assert "max_model_len is 3004, the workload's longest request: longer ones will be refused" in said
    assert "disaggregate: " in said and "runner-up: " in said and "of headroom" in said and "$/M" in said
    settings, _ = flags.resolve(["launch", f"--config={path}"], {})
    assert f"--mesh={settings.mesh}" in said and MeshSpec.parse(settings.mesh).num_devices == 2
    assert settings.model == "/70b" and settings.max_model_len == 3004
    assert launch(["launch", f"--config={path}", "--print_config"]) == 0
    assert f'mesh = "{settings.mesh}"' in capsys.readouterr().out
    script = (tmp_path / "job" / "slurm.sbatch").read_text()
    assert "--job-name=small" in script and "'--model=/70b'" in script and "'--max_model_len=3004'" in script
    assert f"Made from {path}" in script and (tmp_path / "job" / "compose.yaml").exists()


def test_quick_gives_bounds_and_replicas_and_simulates_nothing(capsys):
    assert run("--devices=4", "--trace=mix:3000+100", "--rate=5", "--quick") == 0
    said = capsys.readouterr().out
    assert "upper bounds" in said and "Dynamo" in said and "simulations" not in said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--trace=mix:3000+100", "--slo_ttft_s=0.01"], "unloaded TTFT of"),
        (["--trace=mix:3000+100", "--slo_tpot_s=0.001"], "over the objective of 1 ms"),
        (["--trace=mix:3000+100", "--model=llama3-70b"], "bytes of weights, over 1 x a100"),
        (["--trace=mix:3000"], "INPUT+OUTPUT@SHARE"),
        (["--trace=nothing"], "KIND:FILE"),
        (["--trace=mix:3000+100", "--link=carrier-pigeon"], "GB/s"),
        (["--trace=mix:3000+100", "--max_model_len=100"], "at least 1 request, this one has 0"),
        (["--trace=mix:3000+100", "--transfers=post"], "'post'"),
        (["--trace=mix:3000+100", "--schedules=stages,circle"], "'circle', must be of stages, ring"),
        (["--trace=mix:3000+100", "--modle=x"], "model"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(given, said, capsys):
    assert run("--devices=2", *given) == 2
    error = capsys.readouterr().err
    assert error.startswith("jdisagg plan: ") and said in error and error.count("\n") == 1


TPU = ("plan", "--model=llama3-8b", "--hardware=v5p", "--devices=16", "--trace=mix:3000+100", "--seeds=1", "--most=2")


def test_workers_of_a_plan_for_tpus_are_whole_slices_and_no_stages_span_hosts():
    values = plan.declare()
    flags.read(values, [*TPU, "--chunks=2048"])
    pools = [pool for each in plan.space(values, plan.question(values)[1]) for pool in each.mesh.pools]
    sizes = {(pool.role, pool.pp * pool.tp) for pool in pools}
    assert {size for _, size in sizes} == {4, 8} | {16} & {size for _, size in sizes}
    assert all(pool.pp * pool.tp <= 4 or pool.pp == 1 for pool in pools if pool.role is not Role.DECODE)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--quick", "--emit=gke_tpu"], "--quick computes bounds and makes no plan for --emit"),
        (["--quick", "--output=plan.toml"], "--quick computes bounds and makes no plan for --output"),
        (["--tps=1,2", "--pps=1"], "a worker has (4, 8, 16, 32, 64, 128, 256, 512) devices"),
        (["--emit=gke_tpu", "--tpu=v6e"], "--tpu=v6e and --hardware=v5p"),
        (["--hardware=h100", "--tps=12", "--pps=1"], "on whole hosts of 8"),
    ],
)
def test_what_no_slice_or_host_holds_and_what_writes_nothing_is_one_line(given, said, capsys):
    assert main([*TPU, *given]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_workers_that_leave_chips_of_a_slice_idle_are_named(tmp_path: Path, capsys):
    file = tmp_path / "plan.toml"
    file.write_text('[mesh]\nmesh = "prefill:4xtp1,decode:3xtp4"\n')
    assert main(["plan", "--emit=gke_tpu", f"--config={file}", f"--job_folder={tmp_path}", "--tpu=v5p"]) == 0
    said = capsys.readouterr().out
    assert (
        "prefill: 4 slices of 4 v5p chips (2x2x1) for workers of 1: 12 chips stay idle" in said
        and "decode:" not in said
    )
