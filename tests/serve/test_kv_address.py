"""A worker of a router on another host offers KV at an address that other hosts reach."""

import re
import socket
from pathlib import Path
from typing import Any

import pytest

from jdisagg.core.errors import ConfigError
from jdisagg.core.settings import Settings
from jdisagg.serve.deploy.servers import check_kv_address

REMOTE = "10.0.0.5:8100"
NAMES = {
    "far": ["10.0.0.5"],
    "far6": ["fd00::5"],
    "mine": ["127.0.1.1"],  # as Debian's /etc/hosts has the host's own name
    "mapped": ["::ffff:127.0.0.1"],
    "localhost": ["::1", "127.0.0.1"],
    "0.0.0.0": ["0.0.0.0"],
}


@pytest.fixture(autouse=True)
def resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the machine's names by `NAMES`; addresses are resolved as they are."""
    real = socket.getaddrinfo

    def resolve(host: Any, port: Any, *more: Any, **options: Any) -> list[Any]:
        if host in NAMES and not options.get("flags", 0) & socket.AI_NUMERICHOST:
            return [found for each in NAMES[host] for found in real(each, port, *more, **options)]
        return real(host, port, *more, **{**options, "flags": socket.AI_NUMERICHOST})

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


@pytest.mark.parametrize("router", [REMOTE, "[fd00::5]:8100", "far:8100", "far6:8100"])
@pytest.mark.parametrize(
    ("listen", "advertise", "flag"),
    [
        ("127.0.0.1:0", "", "kv_listen"),
        ("127.1.2.3:8101", "", "kv_listen"),
        ("[::1]:0", "", "kv_listen"),
        ("[::ffff:127.0.0.1]:0", "", "kv_listen"),
        ("localhost:0", "", "kv_listen"),
        ("mine:0", "", "kv_listen"),
        ("mapped:0", "", "kv_listen"),
        ("127.0.0.1:0", "10.0.0.6", "kv_listen"),
        ("0.0.0.0:0", "", "kv_listen"),
        ("[::]:0", "", "kv_listen"),
        (":0", "", "kv_listen"),
        ("0.0.0.0:0", "127.0.0.1", "kv_advertise"),
        ("0.0.0.0:0", "localhost", "kv_advertise"),
        ("[::]:0", "::1", "kv_advertise"),
        ("[::]:0", "[::1]", "kv_advertise"),
        ("10.0.0.6:0", "0.0.0.0", "kv_advertise"),
    ],
)
def test_an_address_of_this_host_alone_is_refused_with_a_remote_router(router, listen, advertise, flag):
    settings = Settings(role="decode", router=router, kv_listen=listen, kv_advertise=advertise)
    given = re.escape(advertise if flag == "kv_advertise" else listen)
    with pytest.raises(ConfigError, match=rf"^--{flag}={given} cannot .* set --kv_listen=ADDRESS:0 ") as raised:
        check_kv_address(settings)
    assert f"--router={router} is on another" in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("service", "shown"),
    [
        ("redis://user:secret@10.0.0.5:6379/0", "redis://10.0.0.5:6379"),
        ("rediss://far:6379", "rediss://far:6379"),
        ("etcd://127.0.0.1:2379,10.0.0.5:2379", "etcd://127.0.0.1:2379,10.0.0.5:2379"),
        ("etcd://[fd00::5]:2379/name", "etcd://[fd00::5]:2379"),
        ("kubernetes:serving/jdisagg", "kubernetes:serving/jdisagg"),
    ],
)
def test_an_address_of_this_host_alone_is_refused_with_a_remote_coordination_service(service: str, shown: str):
    with pytest.raises(ConfigError, match=r"^--kv_listen=127.0.0.1:0 cannot ") as raised:
        check_kv_address(Settings(role="decode", coordination=service))
    assert f"--coordination={shown} is on another" in str(raised.value) and "secret" not in str(raised.value)
    check_kv_address(Settings(role="decode", coordination=service, kv_listen="10.0.0.6:0"))


def test_an_address_of_this_host_alone_suits_a_local_coordination_service():
    check_kv_address(Settings(role="decode", coordination="redis://127.0.0.1:6379/0"))
    check_kv_address(Settings(role="decode", coordination="etcd://localhost:2379"))


@pytest.mark.parametrize(
    "router", ["127.0.0.1:8100", "[::1]:8100", "localhost:8100", "mine:8100", "unknown.invalid:1", ""]
)
def test_an_address_of_this_host_alone_suits_a_local_router_and_one_that_does_not_resolve(router):
    check_kv_address(Settings(role="decode", router=router))


@pytest.mark.parametrize(
    ("listen", "advertise"),
    [
        ("10.0.0.6:0", ""),
        ("[fd00::6]:0", ""),
        ("far:0", ""),
        ("0.0.0.0:8101", "10.0.0.6"),
        ("[::]:0", "[fd00::6]"),
        ("0.0.0.0:0", "mine"),  # launch/slurm.sbatch: the peers resolve the name, and to another address
    ],
)
def test_an_address_that_others_reach_is_taken(listen, advertise):
    check_kv_address(Settings(role="decode", router=REMOTE, kv_listen=listen, kv_advertise=advertise))


def test_commands_of_the_documentation_with_a_remote_router_say_where_kv_is_offered():
    root = Path(__file__).parents[2]
    pages = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    found = [line for page in pages for line in page.read_text(encoding="utf-8").splitlines()]
    remote = [each for each in found if re.search(r"--role=(prefill|decode) .*--router=ROUTER", each)]
    group = [each for each in remote if "worker=" in each]  # its members' own lines have the address
    assert len(remote) > 3
    assert not [each for each in remote if "--kv_listen=ADDRESS:0" not in each and each not in group]
