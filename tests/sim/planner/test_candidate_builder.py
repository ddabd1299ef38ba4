"""Where candidates are built: ports as wide as a worker's devices, and a profile's workers on other meshes."""

import pytest

from jdisagg.commands.plan import main
from jdisagg.core.errors import ConfigError
from jdisagg.sim.planner.limits import CapacityModel
from jdisagg.sim.planner.problem import Objectives, Problem, WorkloadSpec
from jdisagg.sim.planner.space import ProfiledCandidateBuilder
from jdisagg.sim.traces.workloads import read_workload
from tests.sim.planner.cases import candidate, problem
from tests.sim.profiles import BYTES_PER_S, chunk_s, profile


def test_a_port_is_as_wide_as_its_workers_devices():
    wide = problem(device_bytes_per_s=5.0).build(candidate("prefill:tp2,decode:pp2tp2"))
    assert wide.links.bytes_per_s["out", "prefill-0"] == 10.0 and wide.links.bytes_per_s["in", "decode-0"] == 20.0
    assert not problem().build(candidate("prefill:tp2,decode:pp2tp2")).links.bytes_per_s


def test_a_profile_plans_other_counts_of_the_workers_it_has_times_of():
    builder = ProfiledCandidateBuilder(profile())
    asked = Problem(WorkloadSpec(read_workload("mix:16+4")), Objectives(1.0, 0.5), builder.build, 3)
    found = CapacityModel(asked).limits(candidate("prefill:2xtp1,decode:tp1", builder.chunk_tokens))
    assert found.prefill == pytest.approx(2 / chunk_s(16, 16, 0))
    halved = Problem(asked.workload, asked.objectives, builder.half_the_link().build, 3)
    thinner = CapacityModel(halved).limits(candidate("prefill:2xtp1,decode:tp1", builder.chunk_tokens))
    assert thinner.link == pytest.approx(found.link / 2) and found.link < BYTES_PER_S
    with pytest.raises(ConfigError, match="tp2"):
        CapacityModel(asked).limits(candidate("prefill:tp2,decode:tp1"))


def test_a_profile_is_a_cost_of_the_command(tmp_path, capsys):
    path = tmp_path / "profile.json"
    profile().save(path)
    flags = [f"--cost=profile:{path}", "--devices=2", "--trace=mix:16+4", "--quick"]
    assert main(["plan", *flags]) == 0
    assert "prefill:tp1,decode:tp1" in capsys.readouterr().out
    assert main(["plan", *flags, "--inputs=100"]) == 2
    assert "--max_model_len=" in capsys.readouterr().err
    assert main(["plan", "--cost=guess", "--trace=mix:16+4"]) == 2
    assert "'guess'" in capsys.readouterr().err
