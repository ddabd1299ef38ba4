"""How the engines are started and asked."""

import asyncio

from benchmarks.http_client import Server
from benchmarks.load import Sample
from benchmarks.peers.contestants import Pair, ours, vllm_pair
from benchmarks.workload import Job
from tests.benchmarks.sse_server import SSEServer, serving


class PrefillServer(SSEServer):
    """Answers whole, with a ticket for the KV that it keeps."""

    async def stream(self, writer: asyncio.StreamWriter, asked: dict) -> None:
        await self.send_whole(writer, "200 OK", {"kv_transfer_params": {"ticket": asked["prompt"][0]}})


def test_a_pair_is_asked_to_prefill_and_then_to_decode_with_what_the_prefill_said() -> None:
    prefill, decode = PrefillServer(), SSEServer(pace_s=0.01)

    async def ask() -> Sample:
        async with serving(prefill), serving(decode):
            return await Pair(Server(prefill.url, "m"), Server(decode.url, "m")).ask(Job((9, 8), 4))

    sample = asyncio.run(ask())
    assert sample.error == ""
    assert (prefill.bodies[0]["max_tokens"], decode.bodies[0]["max_tokens"]) == (1, 4)
    assert prefill.bodies[0]["kv_transfer_params"]["do_remote_decode"] is True
    assert decode.bodies[0]["kv_transfer_params"] == {"ticket": 9}
    assert sample.num_tokens == 4
    assert sample.ttft_s >= 0.01


def test_a_pair_whose_prefill_fails_says_so() -> None:
    async def ask() -> Sample:
        async with serving(SSEServer(refuse=True)) as full:
            return await Pair(Server(full.url, "m"), Server(full.url, "m")).ask(Job((9,), 4))

    assert asyncio.run(ask()).error.startswith("prefill: ")


def test_ours_is_the_launcher_on_a_port_of_its_own() -> None:
    (command,) = ours("folder", "colocated:1xtp1", "float32", slots=8).commands
    assert command.argv[1:3] == ("-m", "jdisagg.launch")
    assert {"--mesh=colocated:1xtp1", "--model=folder", f"--http_port={command.port}"} <= set(command.argv)


def test_the_two_servers_of_a_pair_share_the_cores_in_halves() -> None:
    prefill, decode = vllm_pair("python", "folder", "float32", "cache", cores=[0, 1, 2, 3]).commands
    assert prefill.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    assert decode.environment["VLLM_CPU_OMP_THREADS_BIND"] == "2,3"
    assert prefill.port != decode.port
