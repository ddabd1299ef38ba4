"""A plan becomes jobs: the committed ones are what is made, schedulers would take them, launch takes their flags."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from jdisagg import flags, launch
from jdisagg.cluster.job import PLACED, RoleWorkers, job_of
from jdisagg.cluster.kubernetes import METRIC, SLICES, slice_of
from jdisagg.cluster.membership import GroupRank, resolve
from jdisagg.commands import plan
from jdisagg.core.errors import ConfigError
from jdisagg.core.settings import Settings
from jdisagg.serve.cluster.coordination import KubernetesLease
from jdisagg.serve.cluster.group.member import devices_each
from jdisagg.serve.cluster.router_process import roles_of
from jdisagg.serve.deploy.servers import check_kv_address
from jdisagg.serve.frontends.http.app import create_app
from jdisagg.terminal import JOBS, VARIABLES, here
from tests.cluster.manifests import COMPOSE, by_schema, faults, pods
from tests.serve.scripted import ScriptedService

ROOT = Path(__file__).parents[2]
POD = ROOT / "configs" / "pod_70b.toml"
WIDE = Settings(mesh="prefill:3xtp8,decode:2xpp4tp8", model="/models/big", drain_s=60, kv_tokens=70_000)


@cache
def made(settings: Settings = WIDE, kinds: tuple[str, ...] = plan.KINDS, tpu: str = "v5p") -> dict[str, str]:
    return plan.files(plan.JobValues(settings, "big", "big:1", 8, tpu, "Made by a test"), kinds)


def documents(files: dict[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, text in files.items():
        if name.endswith(".yaml") and name != "compose.yaml":
            yield from ((name, each) for each in yaml.safe_load_all(text))


def settings_of(words: list[str]) -> Settings:
    """Of `python -m jdisagg.launch FLAGS`, as launch itself reads them."""
    assert words[1:3] == ["-m", "jdisagg.launch"]
    values = launch.declare()
    flags.read(values, [word.replace("$(POD_IP)", "192.0.2.1") for word in words[2:]])
    settings = flags.settings_of(values)
    roles_of(settings)
    return settings


def containers_of(files: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    """As `containers`, of manifests alone."""
    for name, document in documents(files):
        for pod in pods(document):
            for each in pod["spec"]["containers"]:
                yield f"{name} {document['kind']} {each['name']}", [*each["command"], *each["args"]]


def containers(files: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    """(where, command line) of every container."""
    yield from containers_of(files)
    for name, service in yaml.safe_load(files["compose.yaml"])["services"].items():
        yield f"compose.yaml {name}", service["command"]


def test_the_committed_files_are_what_the_plan_makes(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    kinds = ",".join(plan.KINDS)
    assert plan.main(["plan", f"--emit={kinds}", "--config=configs/pod_70b.toml", f"--job_folder={tmp_path}"]) == 0
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert len(names) == 11
    stale = [name for name in names if (tmp_path / name).read_text() != (ROOT / "launch" / name).read_text()]
    assert not stale, "python -m jdisagg plan --emit=slurm,k8s,gke_tpu,compose --config=configs/pod_70b.toml"
    kept = {
        str(path.relative_to(ROOT / "launch"))
        for kind in ("k8s", "gke_tpu")
        for path in (ROOT / "launch" / kind).iterdir()
    }
    assert kept <= set(names)


@pytest.mark.parametrize("settings", [WIDE, replace(WIDE, mesh="colocated:4xtp2", platform="cpu", model="")])
def test_a_server_would_take_every_manifest_inner_pods_included(settings):
    found = [*documents(made(settings)), *documents(made(settings, tpu="v6e"))]
    assert {each["kind"] for _, each in found} >= {"Deployment", "Service", "LeaderWorkerSet", "JobSet"}
    wrong = [(name, each["kind"], fault) for name, each in found for fault in faults(each)]
    several = "colocated" not in settings.mesh  # a DisaggregatedSet has two roles or more
    assert not [each for each in wrong if several or each[1] != "DisaggregatedSet"]
    assert not by_schema(yaml.safe_load(made(settings)["compose.yaml"]), COMPOSE)


def test_what_is_misspelt_anywhere_in_a_manifest_is_found():
    for document in {each["kind"]: each for _, each in documents(made())}.values():
        for pod in range(len([*pods(document)])):
            wrong = copy.deepcopy(document)
            [*pods(wrong)][pod]["spec"]["containers"][0]["imag"] = "x"
            assert faults(wrong), document["kind"]
        wrong = copy.deepcopy(document)
        wrong.get("spec", wrong)["replicaz"] = 2
        assert faults(wrong), document["kind"]
    compose = yaml.safe_load(made()["compose.yaml"])
    compose["services"]["router"]["comand"] = ["x"]
    assert by_schema(compose, COMPOSE)


def mesh_at(where: str) -> str:
    """Of containers of one machine, decode is stages; over hosts it is a ring, which is what spans processes."""
    return "prefill:tp8,decode:pp4tp8" if where.startswith("compose") else "prefill:tp8,decode:ring4tp8"


def test_every_container_is_started_with_flags_that_launch_has():
    for where, words in containers(made()):
        settings = settings_of(words)
        assert (settings.model, settings.kv_tokens, settings.drain_s) == ("/models/big", 70_000, 60.0), where
        assert settings.mesh == mesh_at(where) and settings.dtype == "bfloat16", where
        assert settings.secret_file and settings.platform == ("tpu" if "gke" in where else "gpu"), where
        if settings.router:  # names of Kubernetes resolve to other pods; compose has one host
            check_kv_address(settings if where.startswith("compose") else replace(settings, router="10.0.0.5:8100"))


def test_a_flag_that_launch_no_longer_has_is_found():
    (_, words), *_ = containers(made())
    with pytest.raises(ConfigError, match="unknown flag --kv_tokenz"):
        settings_of([word.replace("kv_tokens", "kv_tokenz") for word in words])


def test_every_setting_that_is_not_placed_reaches_every_process():
    assert PLACED <= flags.FIELDS, "a setting was renamed"
    given = replace(WIDE, queue_limit=7, prefix_caching="off", api_key="key", raw_prompt=True, host="0.0.0.0")
    for where, words in containers(made(given)):
        settings = settings_of(words)
        assert (settings.queue_limit, settings.prefix_caching) == (7, "off"), where
        assert settings.api_key == "" and not settings.raw_prompt, where


def test_the_routers_probes_ask_routes_that_there_are():
    paths = {getattr(each, "path", "") for each in create_app(ScriptedService()).routes}
    router = next(pod for _, each in documents(made()) if each["kind"] == "Deployment" for pod in pods(each))
    (container,) = router["spec"]["containers"]
    asked = {container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert asked == {"/live", "/ready"} and asked <= paths
    assert router["metadata"]["annotations"]["prometheus.io/path"] in paths
    assert (
        router["spec"]["terminationGracePeriodSeconds"]
        > WIDE.drain_s + container["lifecycle"]["preStop"]["sleep"]["seconds"]
    )


def test_services_point_at_ports_and_labels_that_the_fronts_have():
    router = [each for name, each in documents(made()) if name == "k8s/router.yaml"]
    found = [pod for each in router for pod in pods(each)]
    (pod,) = [each for each in found if each["metadata"]["labels"]["app.kubernetes.io/component"] == "front"]
    named = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
    services = {each["metadata"]["name"]: each["spec"] for each in router if each["kind"] == "Service"}
    for spec in services.values():
        assert spec["selector"].items() <= pod["metadata"]["labels"].items()
        assert all(named[port["targetPort"]] == port["port"] for port in spec["ports"])
    assert services.keys() == {"big"}, "workers and fronts find the leader's pod by its lease"


FRONTED = plan.JobValues(WIDE, "big", "big:1", 8, "v5p", "Made by a test", routers=3, fronts=4, namespace="serving")
ONE_ROUTER = replace(FRONTED, routers=1, fronts=0)


@pytest.mark.parametrize("kind", ["k8s", "gke_tpu"])
def test_routers_of_one_deployment_and_all_others_name_one_lease_and_clients_find_the_fronts(kind: str):
    files = plan.files(FRONTED, (kind,))
    assert not [fault for _, each in documents(files) for fault in faults(each)]
    found = [each for name, each in documents(files) if name == f"{kind}/router.yaml"]
    deployments = {each["metadata"]["name"]: each["spec"] for each in found if each["kind"] == "Deployment"}
    services = {each["metadata"]["name"]: each["spec"] for each in found if each["kind"] == "Service"}
    assert {name: spec["replicas"] for name, spec in deployments.items()} == {"big-router": 3, "big-front": 4}
    assert {name: spec["selector"] for name, spec in services.items()} == {
        "big": deployments["big-front"]["selector"]["matchLabels"]
    }
    for where, words in containers_of(files):
        settings = settings_of(words)
        assert (settings.router, settings.coordination) == ("", "kubernetes:serving/big-router"), where
        if settings.role == "router":
            assert settings.control_advertise == "192.0.2.1", "its own pod's address"


@pytest.mark.parametrize("kind", ["k8s", "gke_tpu"])
def test_pods_have_the_rights_that_the_lease_needs_and_no_others(kind: str):
    files = plan.files(FRONTED, (kind,))
    router = {each["kind"]: each for name, each in documents(files) if name == f"{kind}/router.yaml"}
    (subject,) = router["RoleBinding"]["subjects"]
    account = router["ServiceAccount"]["metadata"]["name"]
    assert subject == {"kind": "ServiceAccount", "name": account, "namespace": "serving"}
    assert router["RoleBinding"]["roleRef"]["name"] == router["Role"]["metadata"]["name"]
    rules = {tuple(rule["verbs"]): rule for rule in router["Role"]["rules"]}
    assert rules.keys() == {("create",), ("get", "update")}
    assert rules["get", "update"]["resourceNames"] == ["big-router"]
    assert all(
        (each["apiGroups"], each["resources"]) == (["coordination.k8s.io"], ["leases"]) for each in rules.values()
    )
    accounts = {pod["spec"].get("serviceAccountName") for _, each in documents(files) for pod in pods(each)}
    assert accounts == {account}


def test_the_lease_of_the_manifests_is_one_that_routers_can_open(tmp_path: Path):
    for name in ("token", "namespace"):
        (tmp_path / name).write_text("x")
    place = "serving/big-router"
    assert KubernetesLease(place, "", 5.0, "http://127.0.0.1:1", tmp_path)._objects.endswith("/serving/leases")


@pytest.mark.parametrize("kind", ["k8s", "gke_tpu"])
def test_one_router_has_a_service_for_workers_and_needs_no_lease(kind: str):
    files = plan.files(ONE_ROUTER, (kind,))
    found = [each for name, each in documents(files) if name == f"{kind}/router.yaml"]
    assert {each["kind"] for each in found} == {"Deployment", "Service", "PodDisruptionBudget"}
    pod = next(pod for each in found for pod in pods(each))
    named = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
    services = {each["metadata"]["name"]: each["spec"] for each in found if each["kind"] == "Service"}
    for spec in services.values():
        assert spec["selector"].items() <= pod["metadata"]["labels"].items()
        assert all(named[port["targetPort"]] == port["port"] for port in spec["ports"])
    asked = {settings_of(words).router for where, words in containers_of(files) if "LeaderWorkerSet" in where}
    assert asked == {f"big-router:{named['control']}"} and "big-router" in services


def test_a_service_of_the_sites_own_takes_the_place_of_the_lease_of_kubernetes():
    url = "etcd://etcd.infra:2379"
    values = replace(FRONTED, settings=replace(WIDE, coordination=url))
    files = plan.files(values, ("k8s",))
    assert {settings_of(words).coordination for _, words in containers_of(files)} == {url}
    assert "Role" not in {each["kind"] for _, each in documents(files)}


@pytest.mark.parametrize(
    ("changes", "kind", "says"),
    [
        ({"routers": -1}, "k8s", "--routers is -1 and --fronts 4, must be 1 or more, and 0 or more"),
        ({"routers": 2, "fronts": 0}, "k8s", "--routers=2 needs --fronts=1 or more"),
        (
            {"routers": 1, "fronts": 2},
            "slurm",
            "--routers=1 and --fronts=2: --emit=slurm starts one router and no fronts",
        ),
        ({"routers": 2, "fronts": 1}, "compose", "--routers=2 and --fronts=1: --emit=compose starts one router and no"),
        (
            {"routers": 0, "fronts": -1, "settings": replace(WIDE, coordination="etcd://a:1")},
            "slurm",
            "--coordination=etcd://a:1: --emit=slurm starts one router, which needs none",
        ),
    ],
)
def test_routers_and_fronts_that_cannot_be_are_refused_in_one_line(changes: dict[str, Any], kind: str, says: str):
    with pytest.raises(ConfigError, match=says):
        plan.files(replace(FRONTED, **changes), (kind,))


def test_a_worker_is_asked_for_its_health_at_the_port_where_it_answers():
    for _, document in documents(made()):
        for pod in pods(document):
            (container,) = pod["spec"]["containers"]
            settings = settings_of([*container["command"], *container["args"]])
            if settings.role in ("router", "front"):
                continue
            named = {each["name"]: each["containerPort"] for each in container["ports"]}
            assert named.get("health", -1) == settings.health_port
            probes = [container[name]["httpGet"] for name in container if name.endswith("Probe")]
            assert {each["port"] for each in probes} == ({"health"} if settings.health_port > 0 else set())
            assert {each["path"] for each in probes} <= {"/live", "/ready"}


def test_scalers_follow_what_the_autoscaler_tells_and_stand_for_what_there_is():
    watched = replace(WIDE, autoscale="watch")
    assert not [name for name in made() if "hpa" in name or "keda" in name]
    files = made(watched, ("k8s",))
    found = {name: list(yaml.safe_load_all(text)) for name, text in files.items()}
    assert not [fault for each in found.values() for document in each for fault in faults(document)]
    sets = {each["metadata"]["name"] for each in found["k8s/lws.yaml"] if each["kind"] == "LeaderWorkerSet"}
    for name in ("k8s/hpa.yaml", "k8s/keda.yaml"):
        assert {each["spec"]["scaleTargetRef"]["name"] for each in found[name]} == sets, name
        assert all("jdisagg_desired_replicas" in str(each["spec"]) for each in found[name])
    whole, *others = found["k8s/disaggregatedset.yaml"]
    assert all(role["scaling"] == {"mode": "External"} for role in whole["spec"]["roles"])
    assert not any("replicas" in role["spec"] for role in whole["spec"]["roles"])
    targets = {each["spec"]["scaleTargetRef"]["name"] for each in others if each["kind"] == "HorizontalPodAutoscaler"}
    assert targets == {f"big-{role['name']}" for role in whole["spec"]["roles"]}


def test_the_metric_that_scalers_follow_is_one_that_is_told():
    assert f"`{METRIC}`" in (ROOT / "docs" / "metrics.md").read_text()


def test_every_replica_of_every_role_is_there_and_none_is_evicted_beside_another():
    found = [each for name, each in documents(made()) if name == "k8s/lws.yaml"]
    sets = {each["metadata"]["name"]: each["spec"] for each in found if each["kind"] == "LeaderWorkerSet"}
    shape = {name: (spec["replicas"], spec["leaderWorkerTemplate"]["size"]) for name, spec in sets.items()}
    assert shape == {"big-prefill": (3, 1), "big-decode": (2, 4)}
    budgets = {each["metadata"]["name"]: each["spec"]["maxUnavailable"] for each in found if "Budget" in each["kind"]}
    assert budgets == {"big-prefill": 1, "big-decode": 4}
    jobs = [each for name, each in documents(made()) if name == "k8s/jobset.yaml" and each["kind"] == "JobSet"]
    assert len(jobs) == 5


def test_members_of_a_set_and_of_a_job_find_their_place_in_the_group():
    for where, words in containers(made()):
        if "decode" in where and "LeaderWorkerSet" in where and "gke" not in where:
            variables = {
                "LWS_LEADER_ADDRESS": "big-decode-1.big-decode.ns",
                "LWS_GROUP_SIZE": "4",
                "LWS_WORKER_INDEX": "2",
            }
            place = resolve(settings_of(words), variables)
            assert place and (place.group, place.rank, place.size) == ("big-decode-1", 2, 4)
    jobs = [
        each for _, each in documents(made()) if each["kind"] == "JobSet" and "decode-1" in each["metadata"]["name"]
    ]
    (container,) = next(pods(jobs[0]))["spec"]["containers"]
    variables = {each["name"]: each.get("value", "") for each in container["env"]}
    assert variables["NNODES"] == "4" and {"JOBSET_NAME", "REPLICATED_JOB_NAME", "JOB_INDEX"} <= variables.keys()
    variables |= {
        "JOBSET_NAME": "big-decode-1",
        "REPLICATED_JOB_NAME": "worker",
        "JOB_INDEX": "0",
        "JOB_COMPLETION_INDEX": "3",
    }
    place = resolve(settings_of([*container["command"], *container["args"]]), variables)
    assert place and (place.rank, place.size, place.coordinator) == (3, 4, "big-decode-1-worker-0-0.big-decode-1:8476")


@pytest.mark.parametrize(
    ("chip", "chips", "expected"),
    [
        ("v5p", 8, (2, 4, "2x2x2")),
        ("v5p", 4, (1, 4, "2x2x1")),
        ("v5p", 2, (1, 4, "2x2x1")),
        ("v5p", 64, (16, 4, "4x4x4")),
        ("v6e", 8, (1, 8, "2x4")),
        ("v6e", 16, (4, 4, "4x4")),
        ("v5e", 1, (1, 1, "1x1")),
    ],
)
def test_a_worker_gets_the_smallest_slice_that_holds_it(chip, chips, expected):
    part, topology = slice_of(RoleWorkers("decode", 1, 1, chips), chip)
    assert (part.size, part.devices, topology) == expected


def test_a_slice_asks_for_the_chips_that_its_topology_has():
    for chip in SLICES:
        for name, document in documents(made(kinds=("gke_tpu",), tpu=chip)):
            if name != "gke_tpu/lws.yaml" or document["kind"] != "LeaderWorkerSet":
                continue
            size = document["spec"]["leaderWorkerTemplate"]["size"]
            for pod in pods(document):
                sides = [
                    int(side) for side in pod["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
                ]
                chips = pod["spec"]["containers"][0]["resources"]["limits"]["google.com/tpu"]
                product = 1
                for side in sides:
                    product *= side
                assert size * chips == product
            assert (size > 1) == ("annotations" in document["metadata"])


def test_a_pipeline_of_several_hosts_is_one_that_launch_takes_as_a_group():
    """Whatever a plan calls it; where the hosts of a slice are more than those of a node, too."""
    for settings in (WIDE, replace(WIDE, mesh="prefill:3xtp8,decode:2xring4tp8")):
        for where, words in containers(made(settings, tpu="v6e")):
            told = settings_of(words)
            if not where.startswith("compose") and told.role == "decode":
                assert devices_each(told, GroupRank("g", 0, 4, "127.0.0.1:1")) == 8, where
    narrow = made(replace(WIDE, mesh="prefill:tp8,decode:pp4tp2"))
    meshes = {where.split("/")[0]: settings_of(words).mesh for where, words in containers(narrow)}
    assert (meshes["k8s"], meshes["gke_tpu"]) == ("prefill:tp8,decode:pp4tp2", "prefill:tp8,decode:ring4tp2")


@pytest.mark.parametrize(
    ("settings", "kinds", "says"),
    [
        (replace(WIDE, mesh="auto"), ("slurm",), "a job needs its mesh written out"),
        (replace(WIDE, mesh="prefill:tp12,decode:tp1"), ("k8s",), "workers of 12 devices and --devices_per_host is 8"),
        (replace(WIDE, platform="tpu"), ("slurm",), "gke_tpu has slices"),
        (replace(WIDE, http_port=-1), ("compose",), "--http_port=-1"),
        (replace(WIDE, mesh="prefill:tp12,decode:tp1"), ("gke_tpu",), "prefill workers have 12 chips"),
        (replace(WIDE, mesh="colocated:pp4tp4"), ("slurm",), "write colocated:tp16, or prefill and decode apart"),
        (WIDE, ("swarm",), "--emit names 'swarm'"),
    ],
)
def test_a_job_that_cannot_be_is_refused_in_one_line(settings, kinds, says):
    with pytest.raises(ConfigError) as error:
        made(settings, kinds)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_emit_without_a_plan_says_what_is_needed(capsys):
    assert plan.main(["plan", "--emit=slurm"]) == 2
    assert "--config=plan.toml" in capsys.readouterr().err


# ---------------------------------------------------------------------- SLURM's script

SRUN = """#!/usr/bin/env bash
# Runs what follows srun's own flags, once for each task, as a step on nodes node1, node2, ...
for word in "$@"; do case $word in --ntasks=*) tasks=${word#*=} ;; --het-group=*) component=${word#*=} ;; esac; done
while [[ $1 == --* ]]; do shift; done
export SLURM_STEP_ID=$component SLURM_STEP_NUM_TASKS=$tasks SLURM_STEP_NODELIST="node[1-$tasks]"
for rank in $(seq 0 $((tasks - 1))); do SLURM_PROCID=$rank "$@" || exit 1; done
"""
PYTHON = """#!/usr/bin/env bash
{ printf '%s\\0' "$0" "$@"; env -0 | grep -z -E '^(SLURM_|JAX_COORDINATOR_PORT)'; } > "$STEPS/$RANDOM$RANDOM"
"""


@pytest.fixture
def steps(tmp_path):
    """Runs a job's script where srun and python write down what they are asked: (words, variables) of each process."""

    def run(script: str, **more: str) -> list[tuple[list[str], dict[str, str]]]:
        folder = tmp_path / "steps"
        folder.mkdir()
        for name, text in {"srun": SRUN, "python": PYTHON, "job": script}.items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        path = f"{tmp_path}:{os.environ['PATH']}"
        variables = {"PATH": path, "SLURM_JOB_ID": "7", "HOME": str(tmp_path), "STEPS": str(folder), **more}
        done = subprocess.run(
            [str(tmp_path / "job")], env=os.environ | variables, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        return [_process(path) for path in sorted(folder.iterdir())]

    return run


def _process(path: Path) -> tuple[list[str], dict[str, str]]:
    parts = [part for part in path.read_bytes().decode().split("\0") if part]
    words = [part for part in parts if not part.startswith(("SLURM_", "JAX_"))]
    return words, dict(part.split("=", 1) for part in parts if part.startswith(("SLURM_", "JAX_")))


def test_the_job_of_slurm_starts_every_process_with_flags_that_launch_has(steps):
    found = [(settings_of(words), variables) for words, variables in steps(made()["slurm.sbatch"])]
    roles = sorted(settings.role for settings, _ in found)
    assert roles == ["decode"] * 8 + ["prefill"] * 3 + ["router"]
    (router,) = (settings for settings, _ in found if settings.role == "router")
    for settings, _ in found:
        assert settings.mesh == "prefill:tp8,decode:ring4tp8" and settings.secret_file == router.secret_file
        if settings is not router:
            assert settings.router.endswith(f":{router.control_port}") and settings.kv_advertise
            check_kv_address(replace(settings, router="10.0.0.5:8100"))


def test_each_group_of_a_job_has_its_ranks_and_a_coordinators_port_of_its_own(steps):
    found = [(settings_of(words), variables) for words, variables in steps(made()["slurm.sbatch"])]
    places = [(settings.role, resolve(settings, variables)) for settings, variables in found]
    groups = {place.group: place for _, place in places if place}
    assert sorted(groups) == ["decode-0", "decode-1"]
    assert len({place.coordinator for place in groups.values()}) == 2
    for name in groups:
        assert sorted(place.rank for _, place in places if place and place.group == name) == [0, 1, 2, 3]
    assert all(place is None for role, place in places if role != "decode")


@pytest.mark.parametrize("script", [made()["slurm.sbatch"], made(replace(WIDE, api_key="it's"))["slurm.sbatch"]])
def test_the_job_of_slurm_is_good_bash(script, tmp_path):
    path = tmp_path / "slurm.sbatch"
    path.write_text(script)
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", path], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_a_job_has_a_component_for_the_router_and_one_a_role():
    lines = [line for line in made()["slurm.sbatch"].splitlines() if line.startswith("#SBATCH")]
    assert lines.count("#SBATCH hetjob") == 2
    assert "--ntasks=3 --cpus-per-task=32 --gpus-per-task=8" in lines[3]
    assert "--ntasks=8" in lines[5] and "--ntasks-per-node=1" in lines[5]


def test_one_machines_containers_have_devices_of_their_own():
    job = job_of(replace(WIDE, mesh="prefill:2xtp2,decode:tp4"), "j", "i", "gpu", 8)
    assert [(part.role, part.replicas, part.size, part.devices) for part in job.parts] == [
        ("prefill", 2, 1, 2),
        ("decode", 1, 1, 4),
    ]
    services = yaml.safe_load(made(replace(WIDE, mesh="prefill:2xtp2,decode:tp4"))["compose.yaml"])["services"]
    ids = [
        device
        for service in services.values()
        for reserved in service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
        for device in reserved["device_ids"]
    ]
    assert ids == [str(number) for number in range(8)]


def test_a_pool_on_this_machine_gets_a_container_and_another_machines_does_not():
    def services(pool: str) -> dict[str, Any]:
        compose = yaml.safe_load(made(replace(WIDE, pool=pool))["compose.yaml"])
        assert not by_schema(compose, COMPOSE)
        assert all(f"--pool={pool}" in each["command"] for name, each in compose["services"].items() if name != "pool")
        return compose["services"]

    here = services("redis://127.0.0.1:7000")["pool"]["command"]
    assert here[:5] == ["valkey-server", "--bind", "127.0.0.1", "--port", "7000"] and "allkeys-lru" in here
    assert "pool" not in services("redis://store.example:6379") and "pool" not in services("s3://bucket/kv")
    assert "pool-master" not in services("mooncake://store.example:50051")


def test_a_mooncake_store_on_this_machine_gets_a_master_and_a_node_and_the_image_what_their_client_needs():
    files = made(replace(WIDE, pool="mooncake://127.0.0.1:7001"))
    services = yaml.safe_load(files["compose.yaml"])["services"]
    assert not by_schema(yaml.safe_load(files["compose.yaml"]), COMPOSE)
    assert "--rpc_port=7001" in services["pool-master"]["command"]
    assert "--master_server_address=127.0.0.1:7001" in services["pool-node"]["command"]
    assert '".[mooncake]"' in files["Dockerfile"] and "libibverbs1" in files["Dockerfile"]
    assert '".[pool]"' in made(replace(WIDE, pool="redis://127.0.0.1:7000"))["Dockerfile"]
    assert "[" not in made()["Dockerfile"].split("RUN pip install")[1].split("\n")[0]


NOT_THE_MANIFESTS = {  # variables of places: who sets them
    "MEGASCALE_SLICE_ID": "GKE, in a job of several slices",
    "TPU_NAME": "GKE and TPU VMs",
    "NODE_RACK": "who labels nodes, by hand: Kubernetes tells a pod nothing of its node's labels",
    "NODE_BLOCK": "so",
    "HOSTNAME": "every container",
    "SLURMD_NODENAME": "SLURM",
}


def test_variables_of_places_are_those_that_the_manifests_set() -> None:
    """A JobSet's were read under another name than they were set by, and no pod was told its node's."""
    read = {name for names in (*VARIABLES.values(), JOBS) for name in names}
    told: set[str] = set()
    for _, document in documents(made()):
        if document["kind"] in ("LeaderWorkerSet", "DisaggregatedSet", "JobSet"):
            for pod in pods(document):
                variables = {each["name"] for each in pod["spec"]["containers"][0]["env"]}
                assert "NODE_NAME" in variables
                job = {"JOBSET_NAME", "JOB_INDEX"} if document["kind"] == "JobSet" else {"LWS_NAME", "LWS_GROUP_INDEX"}
                assert job <= variables, document["kind"]
                told |= variables
    assert read == (told & read) | NOT_THE_MANIFESTS.keys()
    assert not told & NOT_THE_MANIFESTS.keys()


@pytest.mark.parametrize(
    "environ",
    [{"JOBSET_NAME": "decode-1", "JOB_INDEX": "0"}, {"LWS_NAME": "decode", "LWS_GROUP_INDEX": "1"}],
)
def test_a_pod_knows_its_node_and_its_worker(environ: dict[str, str]) -> None:
    labels = here("", {**environ, "NODE_NAME": "node-7"}, "a-pod", 1)
    assert (labels.host, labels.slice) == ("node-7", "/".join(environ.values()))
