"""The settings of a run: name, default, group and one line of help. Flags, TOML keys and `LLM(...)` arguments are all
made from these fields (see `jdisagg/flags.py`)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Any

from jdisagg.core.errors import ConfigError, FlagError
from jdisagg.core.router_config import RESERVE_TOKENS

AT_LEAST_ONE = (
    "steps_in_flight",
    "queue_limit",
    "max_body_bytes",
    "max_connections",
    "max_tokens",
    "max_lora_rank",
)
NOT_NEGATIVE = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_chunk_seqs",
    "page_size",
    "max_model_len",
    "max_loras",
    "kv_tokens",
    "dram_tokens",
    "disk_tokens",
    "queue_timeout_s",
    "handoff_timeout_s",
    "prefill_timeout_s",
    "stall_timeout_s",
    "drain_s",
    "reserve_tokens",
    "multi_step",
    "max_retries",
    "debug_keep",
    "temperature",
    "prefill_page_size",
    "transfer_error_bound",
    "group_size",
    "group_wait_s",
    "router_grace_s",
)
_GROUP = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# Settings that earlier versions had, each with the rest of the error line: "was removed; NAME THE REPLACEMENT".
REMOVED: dict[str, str] = {
    "decode_turns": "was removed; use --multi_step, which means the same",
    "reserve": "was removed; write --reserve_tokens=N: decode pages are reserved before prefill, for N output tokens",
}
# Values that earlier versions took, in the same form.
REMOVED_VALUES: dict[tuple[str, str], str] = {
    ("routing", "pair_affinity"): "was removed; use --routing=cache_aware, which weighs the link of each pair",
    ("routing", "predicted"): "was removed; use --routing=cache_aware, which makes the same predictions",
}
LEAST_S = {
    "lease_s": 0.1,  # renewed three times in this time
    "peer_silence_s": 0.5,  # heartbeats are sent five times in this time
    "client_timeout_s": 0.2,  # checked every tenth of a second
}
TOOL_PARSERS = (
    *("auto", "off", "hermes", "llama3", "llama4", "mistral", "deepseek", "gemma4", "phi4", "functools"),
    *("qwen3_coder", "glm", "dsml", "kimi_k2", "kimi_k3", "gpt_oss"),
)
REASONING_PARSERS = ("auto", "off", "think", "mistral", "gemma4", "kimi_k3", "gpt_oss")


def setting(default: Any, group: str, help: str, choices: tuple[str, ...] = (), everyday: bool = False) -> Any:
    """Returns a field of the settings with its default, its group and its line of help."""
    metadata = {"group": group, "help": help, "choices": choices, "everyday": everyday}
    return field(default=default, metadata=metadata)


def everyday(default: Any, group: str, help: str, choices: tuple[str, ...] = ()) -> Any:
    """Returns a field that --help explains; --help only names the others, and --helpfull explains all."""
    return setting(default, group, help, choices, everyday=True)


@dataclass(frozen=True)
class ModelSettings:
    """Settings of the model and of the parsing of its text."""

    model: str = everyday("", "model", "path of a Hugging Face or Orbax folder or a .gguf file, or a built-in name:"
                         " smollm2 (downloaded once), embedded (5 M-parameter code model, the default), demo (smollm2,"
                         " else embedded); calc, plan and sim also take names such as llama3-70b")  # fmt: skip
    cache: str = setting("", "model", "folder of downloaded models and of the digests of model files; empty: in the"
                         " user's cache folder")  # fmt: skip
    tokenizer: str = everyday("", "model", "folder of the tokenizer; empty: the model's")
    served_model_name: str = everyday("", "model", "name clients use; empty: the folder's name")
    load_format: str = everyday("hf", "model", "weight format; random: none are read", ("hf", "orbax", "random"))
    dtype: str = everyday("auto", "model", "dtype of weights, activations and KV; auto: float32 on CPU, else bfloat16",
                         ("auto", "float32", "bfloat16"))  # fmt: skip
    weight_dtype: str = everyday(
        "stored", "model", "dtype of matrices; stored: the checkpoint's int8 or fp8 if products support it, else"
        " --dtype; dtype: as --dtype; auto: the fastest measured one that loses less than 0.001 nats per token, on"
        " the CPU; int8, fp8: one scale per channel, activations rounded per token",
        ("dtype", "auto", "float32", "bfloat16", "int8", "fp8", "stored"))  # fmt: skip
    kv_dtype: str = setting("auto", "model", "KV pages' dtype; auto: --dtype; int8, fp8: a scale per token and head",
                            ("auto", "float32", "bfloat16", "int8", "fp8"))  # fmt: skip
    tool_call_parser: str = setting("auto", "model", "format of tool calls; auto: from the chat template", TOOL_PARSERS)
    reasoning_parser: str = setting("auto", "model", "reasoning format; auto: by the chat template", REASONING_PARSERS)
    embeddings: str = setting("off", "model", "also serve /v1/embeddings and /v1/score; default pooling: the last"
                              " token's state or the mean of all", ("off", "last", "mean"))  # fmt: skip
    structured_output: str = setting("auto", "model", "auto: by grammars if llguidance is installed", ("auto", "off"))
    lora: str = everyday("", "model", "LoRA adapters that clients can request as models: NAME=FOLDER,NAME=FOLDER")
    enable_lora: bool = setting(False, "model", "allow operators to load LoRA adapters, even without --lora")
    max_loras: int = setting(0, "model", "most LoRA adapters in one step; 0: the number in --lora, or 4")
    max_lora_rank: int = setting(16, "model", "largest rank of a LoRA adapter; the memory per adapter grows with it")
    seed: int = setting(0, "model", "random seed (weights, routing, arrivals, training data)")


@dataclass(frozen=True)
class MeshSettings:
    """Settings of the devices."""

    mesh: str = everyday("auto", "mesh", "as prefill:2xtp4,decode:pp2tp2 or colocated:2xtp1; @K: from device K;"
                        " auto: prefill:tp2,decode:pp2 (decode:tp1 for one layer)")  # fmt: skip


@dataclass(frozen=True)
class SizeSettings:
    """Sizes of batches, pages and memory."""

    max_model_len: int = everyday(0, "sizes", "most tokens of prompt and output; 0: the model's (sim, plan: no limit)")
    max_num_seqs: int = everyday(0, "sizes", "most running sequences per decode worker; 0: automatic (8 on the"
                             " CPU; sim, plan: 256 per stage for costs of no known device)")  # fmt: skip
    max_num_batched_tokens: int = everyday(
        0,
        "sizes",
        "most tokens of one step: prompt tokens, plus one row per slot if steps mix both; 0: automatic (512 on the"
        " CPU; sim: 2,048 for costs of no known device)",
    )
    max_chunk_seqs: int = setting(0, "sizes", "most sequences per prefill chunk; 0: automatic (8 on the CPU)")
    page_size: int = everyday(
        0, "sizes", "tokens per KV page; 0: automatic (32 on CPU and GPU; sim: 16 for costs of no known device)"
    )
    kv_tokens: int = everyday(0, "sizes", "KV capacity of each worker in tokens; 0: from the free memory")
    hbm_fraction: float = everyday(0.85, "sizes", "share of a device's memory for weights and KV (TPU, GPU)")
    prefill_buckets: str = setting("", "sizes", "compiled chunk sizes in tokens, as 128,512; empty: automatic")
    prefill_page_size: int = setting(0, "sizes", "tokens per page of prefill workers; 0: as --page_size")
    prefill_dtype: str = setting("auto", "sizes", "dtype of prefill workers' weights and activations; auto: as --dtype",
                                 ("auto", "float32", "bfloat16"))  # fmt: skip
    prefill_kv_dtype: str = setting("auto", "sizes", "dtype of prefill workers' KV pages; auto: as --kv_dtype",
                                    ("auto", "float32", "bfloat16", "int8", "fp8"))  # fmt: skip
    table_buckets: str = setting("", "sizes", "compiled page-table widths in tokens, as 256,1024; empty: automatic")


@dataclass(frozen=True)
class SchedulingSettings:
    """Settings of scheduling, and of timeouts and retries."""

    routing: str = everyday("cache_aware", "scheduling", "how a prefill and a decode worker are chosen for a request",
                           ("cache_aware", "least_loaded", "round_robin", "random"))  # fmt: skip
    colocated_fallback: str = everyday("auto", "scheduling", "auto: colocated workers beside prefill and decode pools"
                                      " take requests that a KV transfer would slow down", ("auto", "off"))  # fmt: skip
    early_rejection: str = setting("auto", "scheduling", "auto: refuse requests (429) that are predicted to miss their"
                                   " own ttft_s or tpot_s", ("auto", "off"))  # fmt: skip
    queue_limit: int = everyday(256, "scheduling", "most waiting requests; further ones are refused (429)")
    queue_timeout_s: float = everyday(60.0, "scheduling", "longest wait before prefill starts, in seconds; 0: no limit")
    prefix_caching: str = everyday("on", "scheduling", "on: keep full KV pages until evicted; requests with a shared"
                                  " prefix compute and transfer only the rest", ("on", "off"))  # fmt: skip
    mixed_steps: str = setting("on", "scheduling", "on: a colocated worker runs chunks and decode rows as one step;"
                               " off: separate steps; results do not depend on the batch", ("on", "off"))  # fmt: skip
    short_prompt_tokens: int = setting(64, "scheduling", "most uncached prompt tokens that a decode worker computes"
                                       " itself if it holds the rest; 0: none")  # fmt: skip
    reserve_tokens: int = everyday(RESERVE_TOKENS, "scheduling", "output tokens for which decode pages are reserved"
                                   " at first; more are granted later")  # fmt: skip
    steps_in_flight: int = setting(2, "scheduling", "decode steps dispatched ahead of the step whose tokens are read")
    multi_step: int = setting(0, "scheduling", "most decode steps per dispatch (fewer if requests wait or pages run"
                              " out); 0: automatic: 32 for a single-stage decode worker, 1 on CPUs and with several"
                              " stages, else 8")  # fmt: skip
    speculative: str = everyday("off", "scheduling", "drafts per step. ngram[:N]: 3 or N tokens from earlier ones;"
                                " draft[:MODEL][:N]: from a small model (default: the folder draft of --model);"
                                " eagle[:FOLDER][:N]: from a head on its states; auto[:MODEL|:eagle[:FOLDER]][:N]: only"
                                " where faster; grammar[:N]: tokens that a grammar forces; off: none")  # fmt: skip
    forced_tokens: int = setting(8, "scheduling", "without --speculative: most forced grammar tokens per decode step,"
                                 " of all rows together, besides one per slot; 0: one token per step")  # fmt: skip
    handoff_timeout_s: float = setting(30.0, "scheduling", "longest wait of a handoff, without prefill, in seconds")
    prefill_timeout_s: float = setting(300.0, "scheduling", "longest time from reservation to first token, seconds")
    stall_timeout_s: float = setting(120.0, "scheduling", "longest gap between two tokens of a request, in seconds")
    max_retries: int = setting(3, "scheduling", "most times that a request is prefilled again after a failure")
    autoscale: str = setting("off", "scheduling", "watch: export the needed workers of each role as metrics;"
                             " flip: also change workers' roles; off: neither", ("off", "watch", "flip"))  # fmt: skip


@dataclass(frozen=True)
class TransferSettings:
    """Settings of KV transfers from prefill to decode workers."""

    transfer: str = everyday("auto", "transfer", "when KV is sent: after the prompt, each chunk or each layer group",
                            ("whole", "chunk", "layer", "auto"))  # fmt: skip
    draft_kv: str = setting("auto", "transfer", "a draft model's KV. rebuild: computed on the decode worker, between"
                            " steps; ship: computed with the model's, then cached and shipped with it; auto: the one"
                            " predicted to be cheaper", ("auto", "rebuild", "ship"))  # fmt: skip
    stage_admission: str = setting("on", "transfer", "on: decoding begins when the first stage's KV is there,"
                                   " later stages' KV follows; off: when all KV is there", ("on", "off"))  # fmt: skip
    transfer_digests: str = setting("full", "transfer", "pages checked by digest on arrival; sampled: every eighth",
                                    ("full", "sampled", "off"))  # fmt: skip
    transfer_compress: str = everyday("none", "transfer", "codec of KV in transfer; auto: by measured link speeds",
                                     ("none", "int8", "fp8", "int4", "auto"))  # fmt: skip
    transfer_error_bound: float = setting(
        0.05,
        "transfer",
        "largest relative error of a layer's KV; above it the layer is sent raw (int4 loses about 0.1)",
    )
    lease_s: float = setting(15.0, "transfer", "seconds for which a reservation is kept without a message from its"
                             " prefill worker")  # fmt: skip


@dataclass(frozen=True)
class TierSettings:
    """Settings of KV tiers below HBM."""

    dram_tokens: int = setting(0, "tiers", "KV tokens each worker keeps in host memory after eviction from HBM; 0: off")
    disk_tokens: int = setting(0, "tiers", "KV tokens each worker keeps on disk (pages used at least twice); 0: off")
    disk_path: str = setting("", "tiers", "folder of the disk tier, one file per worker; kept over restarts")
    tier_compress: str = setting("none", "tiers", "codec of KV in tiers below HBM",
                                 ("none", "int8", "fp8", "int4"))  # fmt: skip
    peer_fetch: bool = setting(False, "tiers", "fetch KV from other workers if that is faster than computing it again")
    pool: str = setting("", "tiers", "pool of KV shared by all workers: redis:// or mooncake://HOST:PORT, s3://BUCKET/PATH,"
                        " file:///FOLDER; empty: none")  # fmt: skip


@dataclass(frozen=True)
class ClusterSettings:
    """Settings of processes: how they find and authenticate each other."""

    role: str = everyday(
        "all",
        "cluster",
        "roles of this process: router, prefill, decode, colocated, several with commas, all, or front",
    )
    labels: str = setting("", "cluster", "location of this process, as host=a,rack=b,slice=c,pod=d; missing labels are"
                          " read from the host's name and the variables of SLURM, Kubernetes and TPUs")  # fmt: skip
    router: str = everyday("", "cluster", "HOST:PORT of the router's control port; not needed with --coordination")
    coordination: str = everyday("", "cluster", "service of the leader lease for several routers, the same for all"
                                 " processes: redis://HOST:PORT/0, rediss://, etcd://HOST:PORT, kubernetes or"
                                 " kubernetes:NAMESPACE/NAME; empty: one router, at --router")  # fmt: skip
    control_advertise: str = setting("", "cluster", "host at which others reach this router, for --coordination;"
                                     " empty: --host")  # fmt: skip
    control_port: int = everyday(8100, "cluster", "port where the router listens for worker processes; 0: any free one")
    kv_listen: str = everyday(
        "127.0.0.1:0",
        "cluster",
        "HOST:PORT where others pull KV; not loopback if the router is on another host; port 0: any free one",
    )
    kv_advertise: str = setting("", "cluster", "host at which other processes reach --kv_listen; empty: its host")
    transport: str = everyday("auto", "cluster", "how KV crosses processes; auto: the fastest that both ends support",
                             ("auto", "shm", "tcp", "jax_transfer", "nixl"))  # fmt: skip
    peer_silence_s: float = everyday(5.0, "cluster", "seconds after which a silent process counts as lost, and after"
                                      " which a leader's lease ends unless it is renewed")  # fmt: skip
    router_grace_s: float = setting(30.0, "cluster", "seconds that streams wait for a new router after a loss; 0: none")
    secret_file: str = everyday("", "cluster", "file with the secret that all processes share, 16 bytes or more")
    group: str = everyday("", "cluster", "name of the worker group of this process; empty: from the job scheduler")
    group_size: int = everyday(0, "cluster", "processes of the group; 0: from SLURM, Kubernetes or the TPU slice;"
                               " 1: no group")  # fmt: skip
    group_rank: int = setting(-1, "cluster", "rank of this process in the group, from 0; -1: from the job scheduler")
    coordinator: str = setting("", "cluster", "HOST:PORT where rank 0 of the worker group listens; :PORT: host from the"
                               " job scheduler; empty: both from it")  # fmt: skip
    group_wait_s: float = setting(300.0, "cluster", "seconds to wait for all processes of a worker group")
    supervise: bool = setting(False, "cluster", "restart this process whenever it fails")
    tls_cert: str = setting("", "cluster", "certificate (PEM) of this process, for control messages and tcp KV")
    tls_key: str = setting("", "cluster", "private key (PEM) of --tls_cert")
    tls_ca: str = setting("", "cluster", "CA certificate (PEM) that signed the other processes' certificates")


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the HTTP and gRPC servers."""

    host: str = everyday("127.0.0.1", "server", "address the servers bind")
    http_port: int = everyday(8000, "server", "HTTP port; 0: any free one, -1: no HTTP")
    grpc_port: int = everyday(8080, "server", "gRPC port; 0: any free one, -1: no gRPC")
    health_port: int = setting(-1, "server", "HTTP port of a worker's /live and /ready; 0: any free one, -1: none")
    api_key: str = everyday("", "server", "key that clients must send; empty: none")
    api_keys_file: str = everyday("", "server", "file of more keys: a name and a key per line; admin's is for /admin")
    client_limits: str = everyday("", "server", "limits per key, or per address without a key, as requests=60,"
                                 "tokens=90000,running=4 (the first two per minute); empty: none")  # fmt: skip
    drain_s: float = everyday(30.0, "server", "seconds for running requests to finish after Ctrl-C or SIGTERM")
    max_body_bytes: int = setting(4 << 20, "server", "largest HTTP body in bytes")
    max_connections: int = setting(
        1000, "server", "most open HTTP and gRPC connections each; fewer if ulimit -n is low"
    )
    client_timeout_s: float = setting(
        30.0, "server", "seconds for a client to send a request or its header, and to read a response"
    )
    debug_keep: int = setting(512, "server", "most requests and decisions shown by /debug; 0: no /debug")
    otlp_endpoint: str = setting("", "server", "OTLP collector of traces (HTTP), as http://localhost:4318; empty: none")
    metrics_compat: str = setting("", "server", "also export metrics by the names of others, as vllm,jetstream")


@dataclass(frozen=True)
class OneShotSettings:
    """Settings of runs that end by themselves."""

    prompt: str = everyday("", "one-shot", "stream one answer to the terminal and stop")
    raw_prompt: bool = setting(False, "one-shot", "complete --prompt unchanged, without the model's chat template")
    chat: bool = everyday(False, "one-shot", "talk in the terminal; Ctrl-C stops an answer, Ctrl-D ends")
    prompts: str = everyday("", "one-shot", "JSONL file of prompts, or OpenAI's batch format, to run with --output")
    output: str = everyday("", "one-shot", "file to write: completions (JSONL), profile (JSON), plan (TOML), a model")
    max_tokens: int = everyday(128, "one-shot", "most output tokens of --prompt, --prompts and an answer of --chat")
    temperature: float = everyday(0.0, "one-shot", "temperature of --prompt, --prompts and --chat")


@dataclass(frozen=True)
class RunningSettings:
    """Settings of the process itself."""

    platform: str = everyday("auto", "running", "devices to use", ("auto", "cpu", "tpu", "gpu"))
    record_dir: str = everyday("", "running", "folder for the journal of every event, for jdisagg replay; empty: none")
    compile_cache_dir: str = everyday("auto", "running", "folder of compiled programs, for the next start; auto: in"
                                     " the user's cache folder; off: none; only:DIR: those of aot --save")  # fmt: skip
    log_level: str = everyday("warning", "running", "log level of the servers; info: also a line per HTTP request",
                             ("debug", "info", "warning", "error"))  # fmt: skip
    log_format: str = setting("text", "running", "json: one object per line, with the request's id", ("text", "json"))


@dataclass(frozen=True)
class Settings(
    RunningSettings,
    OneShotSettings,
    ServerSettings,
    ClusterSettings,
    TierSettings,
    TransferSettings,
    SchedulingSettings,
    SizeSettings,
    MeshSettings,
    ModelSettings,
):
    """All settings of one run, fields of the last class first; `check()` raises for an invalid value."""

    @property
    def tiers(self) -> str:
        """Returns the flags that use tiers below HBM or peers, as they were given; "" without any."""
        names = "dram_tokens", "disk_tokens", "pool", "peer_fetch"
        return " ".join(f"--{name}={getattr(self, name)}" for name in names if getattr(self, name))

    def check(self) -> None:
        """Raises ConfigError with the first invalid setting and its value."""
        for each in fields(self):
            value, choices = getattr(self, each.name), each.metadata["choices"]
            if (each.name, value) in REMOVED_VALUES:
                raise FlagError(f"--{each.name}={value} {REMOVED_VALUES[each.name, value]}")
            if choices and value not in choices:
                raise FlagError(f"--{each.name} is {value!r}, must be one of {', '.join(choices)}")
        for name in AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} is {getattr(self, name)}, must be at least 1")
        for name in NOT_NEGATIVE:
            if not getattr(self, name) >= 0:  # NaN is refused as well
                raise ConfigError(f"--{name} is {getattr(self, name)}, must not be negative")
        for name, least in LEAST_S.items():
            if not getattr(self, name) >= least:
                raise ConfigError(f"--{name} is {getattr(self, name)}, must be at least {least}")
        if not 0 < self.hbm_fraction <= 1:
            raise ConfigError(f"--hbm_fraction is {self.hbm_fraction}, must lie in (0, 1]")
        _check_servers(self)
        _check_tiers(self)
        if bool(self.prompts) != bool(self.output):
            raise ConfigError(f"--prompts={self.prompts!r} and --output={self.output!r}: give both or neither")
        _check_group(self)


def _check_servers(settings: Settings) -> None:
    key, collector = settings.api_key, settings.otlp_endpoint
    for name in ("http_port", "grpc_port", "control_port", "health_port"):
        if not -1 <= getattr(settings, name) <= 65535:
            raise ConfigError(f"--{name} is {getattr(settings, name)}, must lie in [-1, 65535]")
    if not (key.isascii() and key.isprintable() and key == key.strip()):
        raise ConfigError("--api_key must be printable ASCII without a space at its ends: headers hold no other")
    if collector and not collector.startswith(("http://", "https://")):
        raise ConfigError(f"--otlp_endpoint is {collector!r}, must begin with http:// or https://")


def _check_group(settings: Settings) -> None:
    if "," in settings.router:
        raise ConfigError(
            f"--router={settings.router} names several routers: leave it out, and give every process the same"
            " --coordination=redis://HOST:PORT/0, etcd://HOST:PORT or kubernetes, which says the one that leads"
        )
    if settings.group and _GROUP.fullmatch(settings.group) is None:
        raise ConfigError(f"--group is {settings.group!r}, must be up to 64 letters, digits, dots and dashes")
    if settings.group_rank < -1:
        raise ConfigError(f"--group_rank is {settings.group_rank}, must be from 0 on, or -1")
    if settings.group_size and settings.group_rank >= settings.group_size:
        raise ConfigError(f"--group_rank is {settings.group_rank} and --group_size is {settings.group_size}")
    _, colon, port = settings.coordinator.rpartition(":")
    if settings.coordinator and not (colon and port.isdecimal() and 0 < int(port) <= 65535):
        raise ConfigError(f"--coordinator is {settings.coordinator!r}, must be HOST:PORT, or :PORT")


def _check_tiers(settings: Settings) -> None:
    path, tokens = settings.disk_path, settings.disk_tokens
    if bool(path) != bool(tokens):
        raise ConfigError(f"--disk_path={path!r} and --disk_tokens={tokens}: give both or neither")
    if not settings.tiers:
        return
    if settings.group:
        raise ConfigError(f"{settings.tiers} and --group={settings.group}: one worker's processes keep KV in HBM alone")
    if settings.prefix_caching != "on":
        raise ConfigError(f"{settings.tiers} and --prefix_caching={settings.prefix_caching}: tiers keep prefixes")


def int_list(text: str, name: str) -> tuple[int, ...]:
    """Returns the ascending positive integers of "128,512"; raises ConfigError for any other text."""
    try:
        numbers = tuple(int(part) for part in text.split(",") if part)
    except ValueError as error:
        raise ConfigError(f"--{name} is {text!r}, must be numbers as in 128,512") from error
    if list(numbers) != sorted(set(numbers)) or (numbers and numbers[0] < 1):
        raise ConfigError(f"--{name} is {text!r}, must be positive and ascending")
    return numbers
