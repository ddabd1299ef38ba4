"""Who may say that a process is one of a group, in which order, and what cannot be."""

from __future__ import annotations

import pytest

from jdisagg.cluster.membership import STEP_PORTS, GroupRank, resolve, step_port
from jdisagg.cluster.slurm import expand
from jdisagg.core.errors import ConfigError
from jdisagg.core.settings import Settings

SLURM = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "node[07-08]",
}
LWS = {
    "LWS_LEADER_ADDRESS": "llama-decode-2.llama-decode.serving",
    "LWS_GROUP_SIZE": "4",
    "LWS_WORKER_INDEX": "3",
}
JOBSET = {
    "JOB_COMPLETION_INDEX": "1",
    "JOBSET_NAME": "llama",
    "REPLICATED_JOB_NAME": "decode",
    "JOB_INDEX": "5",
    "NNODES": "2",
}
TPU = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "t-0.llama,t-1.llama,t-2.llama,t-3.llama"}
OURS = {
    "JDISAGG_GROUP": "d0",
    "JDISAGG_GROUP_SIZE": "2",
    "JDISAGG_GROUP_RANK": "0",
    "JDISAGG_COORDINATOR": "h0:7101",
}
BY_HAND = {"group": "d1", "group_size": 2, "group_rank": 1, "coordinator": "host-a:7102"}


def place(environ: dict[str, str], role: str = "decode", **given) -> GroupRank | None:
    settings = Settings(role=role, router="r:8100", **given)
    settings.check()
    return resolve(settings, environ)


@pytest.mark.parametrize(
    ("given", "environ", "expected"),
    [
        (BY_HAND, {}, GroupRank("d1", 1, 2, "host-a:7102")),
        ({}, OURS, GroupRank("d0", 0, 2, "h0:7101")),
        ({}, SLURM, GroupRank("slurm-71-3", 1, 2, f"node07:{step_port('71-3')}")),
        ({}, LWS, GroupRank("llama-decode-2", 3, 4, "llama-decode-2.llama-decode.serving:8476")),
        ({}, JOBSET, GroupRank("llama-decode-5", 1, 2, "llama-decode-5-0.llama:8476")),
        ({}, TPU, GroupRank("t-0", 1, 4, "t-0.llama:8476")),
    ],
    ids=["flags", "variables", "SLURM", "LWS", "JobSet", "TPU"],
)
def test_every_source_says_the_whole_place(given, environ, expected):
    assert place(environ, **given) == expected


@pytest.mark.parametrize(
    ("given", "environ", "expected"),
    [
        (BY_HAND, OURS, GroupRank("d1", 1, 2, "host-a:7102")),
        ({"group": "d7"}, OURS, GroupRank("d7", 0, 2, "h0:7101")),
        ({"group": "d7"}, SLURM, GroupRank("d7", 1, 2, f"node07:{step_port('71-3')}")),
        ({"coordinator": ":7103"}, SLURM, GroupRank("slurm-71-3", 1, 2, "node07:7103")),
        ({"coordinator": ":7103"}, LWS, GroupRank("llama-decode-2", 3, 4, "llama-decode-2.llama-decode.serving:7103")),
        ({"coordinator": "[::1]:7103"}, SLURM, GroupRank("slurm-71-3", 1, 2, "[::1]:7103")),
        ({}, SLURM | {"JAX_COORDINATOR_PORT": "7104"}, GroupRank("slurm-71-3", 1, 2, "node07:7104")),
        ({}, SLURM | {"JDISAGG_COORDINATOR": ":7105"}, GroupRank("slurm-71-3", 1, 2, "node07:7105")),
        ({}, OURS | SLURM | {"SLURM_PROCID": "0"}, GroupRank("d0", 0, 2, "h0:7101")),
        (
            {},
            LWS | TPU | {"TPU_WORKER_ID": "3"},
            GroupRank("llama-decode-2", 3, 4, f"{LWS['LWS_LEADER_ADDRESS']}:8476"),
        ),
        (
            {"group_size": 2},
            {name: value for name, value in JOBSET.items() if name != "NNODES"},
            GroupRank("llama-decode-5", 1, 2, "llama-decode-5-0.llama:8476"),
        ),
    ],
)
def test_flags_win_and_what_they_leave_out_the_next_source_says(given, environ, expected):
    assert place(environ, **given) == expected


@pytest.mark.parametrize(
    ("given", "environ"),
    [
        ({}, {}),
        ({"group_size": 1}, SLURM),
        ({}, OURS | {"JDISAGG_GROUP_SIZE": "1"}),
        ({}, {"SLURM_JOB_ID": "71", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "n[1-4]"}),
        ({}, SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}),
        ({}, LWS | {"LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"}),
        ({}, {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"}),
        ({}, {"JOB_COMPLETION_INDEX": "3"}),
        (
            {},
            OURS
            | {"JDISAGG_GROUP": "", "JDISAGG_GROUP_SIZE": "0", "JDISAGG_GROUP_RANK": "-1", "JDISAGG_COORDINATOR": ""},
        ),
    ],
)
def test_a_worker_by_itself_is_no_group(given, environ):
    assert place(environ, **given) is None


@pytest.mark.parametrize("role", ["all", "router", "router,prefill"])
def test_a_process_with_the_router_is_in_no_group(role):
    assert resolve(Settings(role=role), SLURM) is None
    with pytest.raises(ConfigError, match=rf"--group_size=2: a group is one worker, and --role={role} is not"):
        resolve(Settings(role=role, group_size=2), {})


@pytest.mark.parametrize(
    ("given", "environ", "says"),
    [
        ({"group_size": 4}, SLURM, ["--group_size is 4", "SLURM_STEP_NUM_TASKS is 2", "size"]),
        ({"group_rank": 0}, SLURM, ["--group_rank is 0", "SLURM_PROCID is 1", "rank"]),
        ({}, LWS | TPU, ["LWS_WORKER_INDEX is 3", "TPU_WORKER_ID is 1"]),
        (
            {},
            LWS | TPU | {"TPU_WORKER_ID": "3", "TPU_WORKER_HOSTNAMES": "a,b"},
            ["LWS_GROUP_SIZE is 4", "the number of TPU_WORKER_HOSTNAMES is 2"],
        ),
        ({}, OURS | SLURM, ["JDISAGG_GROUP_RANK is 0", "SLURM_PROCID is 1"]),
        ({}, SLURM | {"SLURM_PROCID": "2"}, ["SLURM_PROCID is 2", "SLURM_STEP_NUM_TASKS is 2", "0 to 1"]),
        ({}, SLURM | {"SLURM_STEP_NUM_TASKS": "two"}, ["SLURM_STEP_NUM_TASKS is 'two'", "from 2 on"]),
        ({}, LWS | {"LWS_WORKER_INDEX": "-1"}, ["LWS_WORKER_INDEX is '-1'", "from 0 on"]),
        ({}, SLURM | {"SLURM_STEP_NODELIST": "node[7-"}, ["node[7-"]),
        ({"group": "d1"}, {}, ["nobody says the group's size", "--group_size=N", "--group=d1"]),
        ({"group_size": 2}, {}, ["nobody says the group's rank", "--group_rank=R"]),
        ({"group_size": 2, "group_rank": 0}, {}, ["nobody says the group's host", "--coordinator=HOST:PORT"]),
        (
            {"group_size": 2, "group_rank": 0, "coordinator": "h:1"},
            {},
            ["nobody says the group's group", "--group=NAME"],
        ),
        ({}, {"JDISAGG_COORDINATOR": "h"}, ["JDISAGG_COORDINATOR is 'h'", "HOST:PORT"]),
    ],
)
def test_what_cannot_be_names_who_said_it_and_what(given, environ, says):
    with pytest.raises(ConfigError) as error:
        place(environ, **given)
    assert all(each in str(error.value) for each in says) and "\n" not in str(error.value), str(error.value)


def test_two_steps_of_one_job_have_ports_of_their_own():
    ports = {step_port(f"71-{step}") for step in range(16)}
    assert len(ports) > 14 and all(port in STEP_PORTS for port in ports)
    one, other = (place(SLURM | {"SLURM_STEP_ID": str(step)}) for step in (0, 1))
    assert one and other and one.coordinator != other.coordinator and one.group != other.group


def test_a_step_on_one_node_meets_at_its_loopback():
    found = place(SLURM | {"SLURM_STEP_NODELIST": "vm"})
    assert found and found.coordinator.startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"group": "a b"}, "--group is 'a b'"),
        ({"group_size": -1}, "--group_size is -1"),
        ({"group_rank": -2}, "--group_rank is -2"),
        ({"group_rank": 2, "group_size": 2}, "--group_rank is 2 and --group_size is 2"),
        ({"coordinator": "host"}, "--coordinator is 'host'"),
        ({"coordinator": "host:0"}, "--coordinator is 'host:0'"),
        ({"coordinator": "host:70000"}, "--coordinator is 'host:70000'"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_before_anybody_is_asked(given, says):
    with pytest.raises(ConfigError, match=says.replace("[", r"\[")):
        Settings(**given).check()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("vm", ["vm"]),
        ("a,b-1", ["a", "b-1"]),
        ("node[01-03,7],login", ["node01", "node02", "node03", "node7", "login"]),
        ("r[1-2]n[08-09].x", ["r1n08.x", "r1n09.x", "r2n08.x", "r2n09.x"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
    ],
)
def test_a_list_of_nodes_is_read_in_order(text, expected):
    assert expand(text) == expected


@pytest.mark.parametrize(
    "text", ["n[1-", "n]", "a,,b", ",a", "a b", "n[2-1]", "n[x]", "n[1-99999999]", "", "n[]", "a,"]
)
def test_a_list_of_nodes_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="node"):
        expand(text)


def test_a_group_whose_worker_would_keep_kv_below_hbm_is_refused_whoever_names_the_group():
    with pytest.raises(ConfigError, match="--dram_tokens=64: a worker of 2 processes"):
        resolve(Settings(role="prefill", dram_tokens=64), {**SLURM})
