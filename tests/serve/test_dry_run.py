"""--dry_run: every process of a deployment, with its devices, shards, bytes, ports and command, and nothing touched."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from jdisagg import devices, flags, launch
from tests.launched import launch_here

ROOT = Path(__file__).parents[2]
LARGE = (
    f"--config={ROOT / 'configs' / 'pod_70b.toml'}",
    f"--model={ROOT / 'configs' / 'llama3_70b'}",
    "--target=h100:2x8",
)


@pytest.fixture(autouse=True)
def nothing_is_touched(monkeypatch):
    """No device is asked for, no model is built, nothing is bound."""
    for where, name in ((devices, "prepare"), (launch, "build"), (launch, "build_router"), (launch.servers, "bind")):
        monkeypatch.setattr(where, name, lambda *_, name=name: pytest.fail(f"a dry run calls {name}"))


def told(*arguments: str) -> list[str]:
    """Paragraphs, one a process."""
    done = launch_here("--dry_run", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\nprocess  ")[1:]


def command(paragraph: str) -> list[str]:
    found = re.search(r"command  (.*)", paragraph)
    assert found is not None
    return shlex.split(found[1])


def test_one_process_has_all_workers_and_the_servers_ports():
    (process,) = told("--mesh=prefill:tp2,decode:pp2", "--http_port=8123", "--grpc_port=-1", "--platform=cpu")
    assert "prefill-0: cpu devices 0-1" in process and "decode-0: cpu devices 2-3" in process
    assert "ports    http 127.0.0.1:8123\n" in process
    assert "stage 1: layers 4-5, shards 0-0 of 1" in process


def test_prefill_stages_are_shown_with_their_own_layers():
    (process,) = told("--mesh=prefill:pp2tp2,decode:pp2", "--platform=cpu")
    prefill, decode = process.split("decode-0")[:2]
    assert "stage 0: layers 0-2, shards 0-1 of 2" in prefill and "stage 1: layers 3-5, shards 0-1 of 2" in prefill
    assert "stage 0: layers 0-3" in decode and "stage 1: layers 4-5" in decode


def test_each_rank_of_a_ring_holds_its_stage_and_as_much_as_any_other():
    """Six layers on four stages: two places each, padding among them."""
    place = "--role=decode", "--router=r:1", "--group=g", "--group_size=2", "--coordinator=h:1", "--group_rank=0"
    ranks = told("--mesh=prefill:tp1,decode:ring4", "--platform=cpu", *place)[-2:]
    assert [re.findall(r"stage (\d): layers (\d-\d)", rank) for rank in ranks] == [
        [("0", "0-1"), ("1", "2-3")],
        [("2", "4-4"), ("3", "5-5")],
    ]
    wholes = [re.findall(r"whole: (.*)", rank) for rank in ranks]
    assert wholes[0] == wholes[1] and "0.00" not in wholes[0][0]


def test_a_cluster_has_a_router_without_devices_and_a_process_a_role():
    router, *workers = told(*LARGE, "--role=router")
    assert router.startswith("router\n") and "devices" not in router
    assert "http 0.0.0.0:8000, grpc 0.0.0.0:8080, control 0.0.0.0:8100" in router
    assert [each.splitlines()[0] for each in workers] == ["prefill", "decode"]
    assert "stage 3: layers 61-79, shards 0-1 of 2" in workers[1]
    assert "--router=ROUTER:8100" in command(workers[1]) and "KV ADDRESS:any free one" in workers[1]
    assert "--kv_listen=ADDRESS:0" in command(workers[1])


@pytest.mark.parametrize("size", [2, 4, 8])
def test_ranks_of_a_group_share_its_devices_stages_and_bytes(size):
    whole = whole_of(told(*LARGE, "--role=decode", "--router=r:8100")[-1])
    ranks = [
        each for each in told(*LARGE, "--role=decode", "--router=r:8100", f"--group_size={size}") if "rank" in each
    ]
    assert [each.splitlines()[0] for each in ranks] == [f"decode, rank {rank} of {size}" for rank in range(size)]
    spans = [re.search(r"devices (\d+)-(\d+)", each) for each in ranks]
    assert [int(span[1]) for span in spans if span] == list(range(8, 16, 8 // size))
    assert sum(map(whole_of, ranks)) == pytest.approx(whole, abs=0.01 * size)
    assert ["coordinator" in each.split("command")[0] for each in ranks] == [True] + [False] * (size - 1)


def whole_of(paragraph: str) -> float:
    """GiB of weights."""
    found = re.search(r"whole: ([\d.,]+) GiB of weights", paragraph)
    assert found is not None
    return float(found[1].replace(",", ""))


def test_every_command_is_one_that_launch_takes():
    for paragraph in told(*LARGE, "--role=prefill", "--router=r:8100", "--group_size=2", "--group=p"):
        words = command(paragraph)
        values = launch.declare()
        flags.read(values, words[2:])
        settings = flags.settings_of(values)
        assert settings.page_size == 64 and settings.mesh == "prefill:tp8,decode:pp4tp2"
        assert (settings.group_size, settings.group) == ((2, "p") if "rank" in paragraph else (0, ""))


def test_weights_of_all_devices_are_the_model():
    prefill = next(each for each in told(*LARGE, "--role=router") if each.startswith("prefill"))
    table = 128_256 * 8192  # each of eight shards looks its tokens up by itself
    assert whole_of(prefill) == pytest.approx((70_552.4e6 + 7 * table) * 2 / 2**30, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--dry_run", "--platform=gpu"], "say whose memory there is by --target"),
        (["--dry_run", "--platform=tpu", "--target=h100:8"], "--platform=tpu and --target=h100:8, which is a gpu"),
        (["--target=h100:8"], "--target=h100:8 is for --dry_run"),
        (["--dry_run", *LARGE, "--role=decode", "--router=r:1", "--group_size=3"], "8 devices: a group of 3"),
        (["--dry_run", "--mesh=prefill:tp1,decode:pp9"], "9 stages (pp) for 6 layers"),
    ],
)
def test_a_dry_run_that_cannot_be_is_one_line(arguments, says):
    done = launch_here(*arguments)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1
