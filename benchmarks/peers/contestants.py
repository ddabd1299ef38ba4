"""Who takes part: how each engine is started on a model, and how it is asked. No flags, no measuring.

All get the same checkpoint, the same prompts and all cores; a prefill/decode pair shares the same cores in two halves.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.http_client import HTTPFailed, Server
from benchmarks.load import Ask, Sample
from benchmarks.peers.processes import Command, free_port
from benchmarks.workload import Job

NAME = "m"  # of the model, everywhere
MAX_MODEL_LEN = 2048
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}
# What launch/demo.sh sets: large host copies are bound by page faults with glibc's defaults.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "268435456",
}
# As vLLM's own NIXL connector is asked: keep the KV for somebody else to fetch.
PREFILL_ONLY = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True, slots=True)
class Served:
    """An engine behind HTTP: its servers, the last of which streams the answers."""

    name: str
    commands: tuple[Command, ...]
    pair: bool = False  # ask the first to prefill, the second to decode

    def ask(self, timeout_s: float) -> Ask:
        servers = [Server(f"http://127.0.0.1:{each.port}/v1", NAME, timeout_s=timeout_s) for each in self.commands]
        return Pair(*servers).ask if self.pair else servers[-1].ask


@dataclass(frozen=True, slots=True)
class Generated:
    """`transformers` generate, one padded batch in a process of its own."""

    name: str
    python: str
    model: str
    environment: Mapping[str, str]


Contestant = Served | Generated


@dataclass(frozen=True, slots=True)
class Pair:
    """vLLM's two servers, asked one after the other as its own proxies do: the second fetches the first one's KV."""

    prefill: Server
    decode: Server

    async def ask(self, job: Job) -> Sample:
        """A sample timed from the prefill's request; its tokens are those that the decode server streams."""
        fields = {"model": NAME, "prompt": job.prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        began = time.perf_counter()
        try:
            answer = await self.prefill.post("/completions", fields | {"kv_transfer_params": PREFILL_ONLY})
        except (OSError, TimeoutError, HTTPFailed, ValueError) as error:
            return Sample(began, error=f"prefill: {type(error).__name__}: {error}", ended_s=time.perf_counter())
        extra = {"kv_transfer_params": answer["kv_transfer_params"]}
        return replace(await replace(self.decode, extra=extra).ask(job), sent_s=began)


def ours(model: str, mesh: str, dtype: str, slots: int, more: Sequence[str] = ()) -> Served:
    """`python -m jdisagg.launch` by the interpreter that runs this."""
    port = free_port()
    flags = {
        "model": model,
        "mesh": mesh,
        "dtype": dtype,
        "served_model_name": NAME,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": slots,
        "http_port": port,
        "grpc_port": -1,
        "platform": "cpu",
    }
    argv = (sys.executable, "-m", "jdisagg.launch", *(f"--{name}={value}" for name, value in flags.items()), *more)
    return Served(f"jdisagg {mesh}", (Command(argv, port, "/ready", MALLOC),))


def vllm(python: str, model: str, dtype: str, cache: str, *, eager: bool, more: Sequence[str] = ()) -> Served:
    """vLLM's CPU build; eager, or compiled as it is by default."""
    name = "vLLM " + ("eager" if eager else "default")
    more = ("--enforce-eager", *more) if eager else more
    return Served(name, (_vllm_command(python, model, dtype, cache, more, {}),))


def vllm_ngrams(guessed: int) -> tuple[str, ...]:
    """Drafts of `guessed` tokens, found by the longest of the last one to three tokens that stood before."""
    drafts = {"method": "ngram", "num_speculative_tokens": guessed, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    return "--speculative-config", json.dumps(drafts)


def vllm_pair(python: str, model: str, dtype: str, cache: str, cores: Sequence[int]) -> Served:
    """vLLM's prefill and decode servers over NIXL (UCX on loopback), each on its half of `cores`."""
    half = len(cores) // 2
    assert half, "a pair needs two cores"
    connector = '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu"}'
    more = ("--enforce-eager", "--no-enable-prefix-caching", "--kv-transfer-config", connector)
    commands = []
    for mine in (cores[:half], cores[half:]):
        environment = {
            "UCX_TLS": "tcp,self,sm",
            "UCX_NET_DEVICES": "lo",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, mine)),
        }
        commands.append(_vllm_command(python, model, dtype, cache, more, environment))
    return Served("vLLM prefill/decode over NIXL", tuple(commands), pair=True)


def _vllm_command(
    python: str, model: str, dtype: str, cache: str, more: Sequence[str], environment: Mapping[str, str]
) -> Command:
    port = free_port()
    flags = {
        "model": model,
        "served-model-name": NAME,
        "host": "127.0.0.1",
        "port": port,
        "dtype": dtype,
        "max-model-len": MAX_MODEL_LEN,
        "max-num-seqs": 64,
    }
    argv = [python, "-m", "vllm.entrypoints.openai.api_server", "--no-enable-log-requests"]
    argv += [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    own: dict[str, str] = {
        **OFFLINE,
        "HF_HOME": f"{cache}/hf",
        "VLLM_CACHE_ROOT": f"{cache}/vllm",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return Command((*argv, *more), port, "/health", own | dict(environment))


def generate(python: str, model: str, cache: str) -> Generated:
    return Generated("transformers generate", python, model, OFFLINE | {"HF_HOME": f"{cache}/hf"})


def llamacpp(server: str, gguf: str, threads: int, slots: int) -> Served:
    """llama.cpp's server on a GGUF file of the same checkpoint."""
    port = free_port()
    flags: dict[str, Any] = {"-m": gguf, "--host": "127.0.0.1", "--port": port, "-t": threads, "-tb": threads}
    flags |= {"-np": slots, "-c": slots * MAX_MODEL_LEN}
    argv = (server, *(str(part) for pair in flags.items() for part in pair), "--offline", "--no-webui")
    return Served("llama.cpp server", (Command(argv, port, "/health"),))
