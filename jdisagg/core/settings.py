"""Every setting of a run, once: name, default, group and one line of help. Flags, TOML keys and `LLM(...)` arguments
are all made from these fields (see `jdisagg/flags.py` and `jdisagg/flags.py`)."""

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
    "decode_turns": "was removed; say --multi_step, which means the same",
    "reserve": "was removed; write --reserve_tokens=N: decode pages are reserved before prefill, for N output tokens",
}
# Values that earlier versions took, in the same form.
REMOVED_VALUES: dict[tuple[str, str], str] = {
    ("routing", "pair_affinity"): "was removed; use --routing=cache_aware, which weighs the link of each pair",
    ("routing", "predicted"): "was removed; use --routing=cache_aware, which predicts all that it predicted",
}
LEAST_S = {
    "lease_s": 0.1,  # it is renewed three times in this
    "peer_silence_s": 0.5,  # it is broken five times in this
    "client_timeout_s": 0.2,  # it is looked at every tenth of a second
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
    """The model, and what is made of its text."""

    model: str = everyday("", "model", "Hugging Face or Orbax folder, or GGUF file; smollm2: a small real one, fetched"
                         " once; empty, embedded: the code model here; demo: whichever of these is there;"
                         " llama3-70b and its like where nothing is loaded")  # fmt: skip
    cache: str = setting("", "model", "folder of fetched models and of the digests of model files; empty: in the user's"
                         " cache folder")  # fmt: skip
    tokenizer: str = everyday("", "model", "folder of the tokenizer; empty: the model's")
    served_model_name: str = everyday("", "model", "name clients use; empty: the folder's name")
    load_format: str = everyday("hf", "model", "how weights are read", ("hf", "orbax", "random"))
    dtype: str = everyday("auto", "model", "of weights, activations and KV; auto: float32 on CPU, else bfloat16",
                         ("auto", "float32", "bfloat16"))  # fmt: skip
    weight_dtype: str = everyday(
        "stored", "model", "of matrices; stored: int8 and fp8 as a checkpoint has them where products take that, else"
        " dtype; dtype: as --dtype; auto: what is measured to be the fastest of those that lose less than 0.001"
        " nats a token, on the CPU; int8, fp8: a scale a channel, activations rounded by token",
        ("dtype", "auto", "float32", "bfloat16", "int8", "fp8", "stored"))  # fmt: skip
    kv_dtype: str = setting("auto", "model", "of the KV pages; auto: as dtype; int8, fp8: a scale a token and head",
                            ("auto", "float32", "bfloat16", "int8", "fp8"))  # fmt: skip
    tool_call_parser: str = setting("auto", "model", "how calls are written; auto: by the template", TOOL_PARSERS)
    reasoning_parser: str = setting("auto", "model", "how reasoning is marked; auto: as above", REASONING_PARSERS)
    embeddings: str = setting("off", "model", "also answer /v1/embeddings and /v1/score, by the last token's state or"
                              " the mean of all where a request does not say", ("off", "last", "mean"))  # fmt: skip
    structured_output: str = setting("auto", "model", "auto: by grammars where llguidance is", ("auto", "off"))
    lora: str = everyday("", "model", "adapters that clients may ask for as models, as NAME=FOLDER,NAME=FOLDER")
    enable_lora: bool = setting(False, "model", "let an operator load adapters, also where --lora names none")
    max_loras: int = setting(0, "model", "adapters that one step may hold; 0: as many as --lora names, or 4")
    max_lora_rank: int = setting(16, "model", "largest rank of an adapter; what each costs grows with it")
    seed: int = setting(0, "model", "of whatever is drawn: random weights, routes, arrivals, training data")


@dataclass(frozen=True)
class MeshSettings:
    """Devices."""

    mesh: str = everyday("auto", "mesh", "as prefill:2xtp4,decode:pp2tp2 or colocated:2xtp1; @K: from device K on;"
                        " auto: prefill:tp2,decode:pp2 (decode:tp1 for one layer)")  # fmt: skip


@dataclass(frozen=True)
class SizeSettings:
    """How much fits into what."""

    max_model_len: int = everyday(0, "sizes", "tokens of prompt and output; 0: the model's (sim, plan: no limit)")
    max_num_seqs: int = everyday(0, "sizes", "sequences one decode worker runs at once; 0: chosen (8 on the CPU;"
                             " sim, plan: 256 a stage for costs of no known device)")  # fmt: skip
    max_num_batched_tokens: int = everyday(
        0,
        "sizes",
        "tokens of one step: prompts', and a row a slot where steps mix both; 0: chosen (512 on the CPU;"
        " sim: 2,048 for costs of no known device)",
    )
    max_chunk_seqs: int = setting(0, "sizes", "sequences packed into one prefill chunk; 0: chosen (8 on the CPU)")
    page_size: int = everyday(
        0, "sizes", "tokens a KV page; 0: chosen (32 on CPU and GPU; sim: 16 for costs of no known device)"
    )
    kv_tokens: int = everyday(0, "sizes", "KV capacity of each worker in tokens; 0: by memory")
    hbm_fraction: float = everyday(0.85, "sizes", "share of a device's memory for weights and KV (TPU, GPU)")
    prefill_buckets: str = setting("", "sizes", "declared chunk sizes in tokens, as 128,512; empty: chosen")
    prefill_page_size: int = setting(0, "sizes", "tokens a page of prefill workers; 0: as page_size")
    prefill_dtype: str = setting("auto", "sizes", "of prefill workers' weights and activations; auto: as dtype",
                                 ("auto", "float32", "bfloat16"))  # fmt: skip
    prefill_kv_dtype: str = setting("auto", "sizes", "of prefill workers' KV pages; auto: as kv_dtype",
                                    ("auto", "float32", "bfloat16", "int8", "fp8"))  # fmt: skip
    table_buckets: str = setting("", "sizes", "declared page-table widths in tokens, as 256,1024; empty: chosen")


@dataclass(frozen=True)
class SchedulingSettings:
    """Who runs when, and what is done about failures."""

    routing: str = everyday("cache_aware", "scheduling", "how a prefill and a decode worker are chosen for a request",
                           ("cache_aware", "least_loaded", "round_robin", "random"))  # fmt: skip
    colocated_fallback: str = everyday("auto", "scheduling", "auto: workers of both roles beside pools take requests"
                                      " that shipping is predicted to make slower", ("auto", "off"))  # fmt: skip
    early_rejection: str = setting("auto", "scheduling", "auto: requests that state ttft_s or tpot_s are refused (429)"
                                   " where they are predicted to miss it", ("auto", "off"))  # fmt: skip
    queue_limit: int = everyday(256, "scheduling", "waiting requests over which new ones are refused (429)")
    queue_timeout_s: float = everyday(60.0, "scheduling", "longest wait before prefill starts; 0: none")
    prefix_caching: str = everyday("on", "scheduling", "on: full pages of KV are kept until somebody needs the room;"
                                  " prompts that begin alike compute and ship their ends", ("on", "off"))  # fmt: skip
    mixed_steps: str = setting("on", "scheduling", "on: a colocated worker runs chunks and decode rows as one step;"
                               " off: in turns, so that sums are the same in any company", ("on", "off"))  # fmt: skip
    short_prompt_tokens: int = setting(64, "scheduling", "end of a prompt that a decode worker computes itself where"
                                       " it holds the rest; 0: none")  # fmt: skip
    reserve_tokens: int = everyday(RESERVE_TOKENS, "scheduling", "output tokens for which decode pages are reserved"
                                   " at first; more are granted later")  # fmt: skip
    steps_in_flight: int = setting(2, "scheduling", "decode steps dispatched before the first one's tokens are read")
    multi_step: int = setting(0, "scheduling", "Max decode steps per dispatch (fewer if requests wait or pages run"
                              " out). 0 = automatic: 32 for a single-stage decode worker, 1 on CPUs and with several"
                              " stages, else 8")  # fmt: skip
    speculative: str = everyday("off", "scheduling", "ngram[:N]: 3 or N tokens a step are guessed from earlier ones;"
                                " draft[:MODEL][:N]: by a small model (MODEL/draft of --model where none is named);"
                                " eagle[:FOLDER][:N]: by a head on its states; auto[:MODEL|:eagle[:FOLDER]][:N]: where"
                                " faster; grammar[:N]: what a grammar forces")  # fmt: skip
    forced_tokens: int = setting(8, "scheduling", "without --speculative: tokens that grammars force, of all rows of a"
                                 " decode step together, fed beside its slots'; 0: one a step")  # fmt: skip
    handoff_timeout_s: float = setting(30.0, "scheduling", "deadline of a handoff's waits, prefill apart")
    prefill_timeout_s: float = setting(300.0, "scheduling", "from a free reservation to the first token")
    stall_timeout_s: float = setting(120.0, "scheduling", "longest gap between two tokens of a request")
    max_retries: int = setting(3, "scheduling", "times a request is prefilled again after a failure")
    autoscale: str = setting("off", "scheduling", "watch: tell by metrics how many workers of each role the load asks"
                             " for; flip: also change workers' roles to fit it", ("off", "watch", "flip"))  # fmt: skip


@dataclass(frozen=True)
class TransferSettings:
    """How KV goes from prefill to decode workers."""

    transfer: str = everyday("auto", "transfer", "when a prompt's KV leaves its prefill mesh",
                            ("whole", "chunk", "layer", "auto"))  # fmt: skip
    draft_kv: str = setting("auto", "transfer", "a draft model's KV: rebuild: made where tokens are drawn, between"
                            " steps; ship: made with the model's, and kept, shipped and found as prefixes with it;"
                            " auto: whichever is thought to be cheaper", ("auto", "rebuild", "ship"))  # fmt: skip
    stage_admission: str = setting("on", "transfer", "on: decoding begins when the first stage's KV is there, later"
                                   " stages' follows in time; off: when all is", ("on", "off"))  # fmt: skip
    transfer_digests: str = setting("full", "transfer", "pages checked where they land; sampled: every eighth",
                                    ("full", "sampled", "off"))  # fmt: skip
    transfer_compress: str = everyday("none", "transfer", "what KV is quantised to for the way; auto: as measured",
                                     ("none", "int8", "fp8", "int4", "auto"))  # fmt: skip
    transfer_error_bound: float = setting(
        0.05, "transfer", "relative error of a layer's KV over which it travels uncompressed (int4 loses about 0.1)"
    )
    lease_s: float = setting(15.0, "transfer", "how long a reservation is kept when nothing is heard of its prefill"
                             " worker")  # fmt: skip


@dataclass(frozen=True)
class TierSettings:
    """KV outside of the devices."""

    dram_tokens: int = setting(0, "tiers", "KV each worker keeps in host memory when it leaves the device's; 0: none")
    disk_tokens: int = setting(0, "tiers", "so, on disk, of what was used twice; 0: none")
    disk_path: str = setting("", "tiers", "folder of the disk's files, one a worker; they outlive a restart")
    tier_compress: str = setting("none", "tiers", "what KV below the device is quantised to (as for transfers)",
                                 ("none", "int8", "fp8", "int4"))  # fmt: skip
    peer_fetch: bool = setting(False, "tiers", "workers lend each other KV, where that beats computing it again")
    pool: str = setting("", "tiers", "KV that all workers share: redis:// or mooncake://HOST:PORT, s3://BUCKET/PATH,"
                        " file:///FOLDER")  # fmt: skip


@dataclass(frozen=True)
class ClusterSettings:
    """Processes, and how they find and trust each other."""

    role: str = everyday(
        "all",
        "cluster",
        "what this process plays: router, prefill, decode, colocated, several with commas, all, or front",
    )
    labels: str = setting("", "cluster", "where this process stands, as host=a,rack=b,slice=c,pod=d; what is not said"
                          " here is asked of the host's name, SLURM's, Kubernetes' and TPU variables")  # fmt: skip
    router: str = everyday("", "cluster", "HOST:PORT of the router's control port; not needed with --coordination")
    coordination: str = everyday("", "cluster", "service that says which of several routers leads, told to all"
                                 " processes: redis://HOST:PORT/0, rediss://, etcd://HOST:PORT, kubernetes or"
                                 " kubernetes:NAMESPACE/NAME; empty: one router, at --router")  # fmt: skip
    control_advertise: str = setting("", "cluster", "host at which others reach this router, for --coordination;"
                                     " empty: --host")  # fmt: skip
    control_port: int = everyday(8100, "cluster", "where the router's process hears worker processes; 0: any free one")
    kv_listen: str = everyday(
        "127.0.0.1:0",
        "cluster",
        "HOST:PORT where others pull KV; not loopback with a router on another host; port 0: any free one",
    )
    kv_advertise: str = setting("", "cluster", "host where others reach --kv_listen; empty: the one it names")
    transport: str = everyday("auto", "cluster", "how KV crosses processes; auto: the fastest that both ends share",
                             ("auto", "shm", "tcp", "jax_transfer", "nixl"))  # fmt: skip
    peer_silence_s: float = everyday(5.0, "cluster", "seconds after which a silent process counts as gone, and in which"
                                      " a leader's lease ends unless it is renewed")  # fmt: skip
    router_grace_s: float = setting(30.0, "cluster", "how long streams wait for a router when theirs is gone; 0: not")
    secret_file: str = everyday("", "cluster", "file with the secret that all processes share, 16 bytes or more")
    group: str = everyday("", "cluster", "worker of several processes; empty: as the scheduler says")
    group_size: int = everyday(0, "cluster", "its processes; 0: as SLURM, Kubernetes or the TPU slice say; 1: no"
                               " group")  # fmt: skip
    group_rank: int = setting(-1, "cluster", "this process's place in its group, from 0; -1: as the scheduler says")
    coordinator: str = setting("", "cluster", "HOST:PORT where the group's rank 0 listens, one a group; :PORT: the"
                               " scheduler says the host; empty: it says both")  # fmt: skip
    group_wait_s: float = setting(300.0, "cluster", "time for all processes of a group to come")
    supervise: bool = setting(False, "cluster", "start it again whenever it ends by a failure")
    tls_cert: str = setting("", "cluster", "certificate (PEM) of this process, for control messages and tcp KV")
    tls_key: str = setting("", "cluster", "its private key (PEM)")
    tls_ca: str = setting("", "cluster", "authority (PEM) that the other processes' certificates are of")


@dataclass(frozen=True)
class ServerSettings:
    """What clients meet."""

    host: str = everyday("127.0.0.1", "server", "address the servers bind")
    http_port: int = everyday(8000, "server", "HTTP port; 0: any free one, -1: no HTTP")
    grpc_port: int = everyday(8080, "server", "gRPC port; 0: any free one, -1: no gRPC")
    health_port: int = setting(-1, "server", "HTTP port of a worker's process, /live and /ready; 0: any, -1: none")
    api_key: str = everyday("", "server", "key that clients must send; empty: none")
    api_keys_file: str = everyday("", "server", "more keys: a name and a key a line; that of admin is for /admin")
    client_limits: str = everyday("", "server", "of each key, or address where there is none, as requests=60,"
                                 "tokens=90000,running=4 (the first two a minute); empty: none")  # fmt: skip
    drain_s: float = everyday(30.0, "server", "time running requests get to finish after Ctrl-C or SIGTERM")
    max_body_bytes: int = setting(4 << 20, "server", "largest HTTP body")
    max_connections: int = setting(1000, "server", "open HTTP and gRPC connections each; fewer where ulimit -n is low")
    client_timeout_s: float = setting(
        30.0, "server", "a client's time to ask for something, for a header, and to read what it was sent"
    )
    debug_keep: int = setting(512, "server", "requests and decisions that /debug remembers; 0: no /debug")
    otlp_endpoint: str = setting("", "server", "collector of traces by OTLP over HTTP, as http://localhost:4318")
    metrics_compat: str = setting("", "server", "also export metrics under these names, as vllm,jetstream")


@dataclass(frozen=True)
class OneShotSettings:
    """Runs that end by themselves."""

    prompt: str = everyday("", "one-shot", "stream one answer to the terminal and stop")
    raw_prompt: bool = setting(False, "one-shot", "complete --prompt as it stands, without the model's chat template")
    chat: bool = everyday(False, "one-shot", "talk in the terminal; Ctrl-C stops an answer, Ctrl-D ends")
    prompts: str = everyday("", "one-shot", "JSONL file of prompts, or OpenAI's batch format, to run with --output")
    output: str = everyday(
        "", "one-shot", "what is written: completions (JSONL), a profile (JSON), a plan (TOML), a model"
    )
    max_tokens: int = everyday(128, "one-shot", "output tokens of --prompt, --prompts and an answer of --chat")
    temperature: float = everyday(0.0, "one-shot", "temperature of --prompt, --prompts and --chat")


@dataclass(frozen=True)
class RunningSettings:
    """The process itself."""

    platform: str = everyday("auto", "running", "devices to use", ("auto", "cpu", "tpu", "gpu"))
    record_dir: str = everyday("", "running", "keep the journal of every event here, for jdisagg replay")
    compile_cache_dir: str = everyday("auto", "running", "folder of compiled programs, for the next start; auto: in"
                                     " the user's cache folder; off: none; only:DIR: aot --save's alone")  # fmt: skip
    log_level: str = everyday("warning", "running", "of the servers; info: also a line for every HTTP request",
                             ("debug", "info", "warning", "error"))  # fmt: skip
    log_format: str = setting("text", "running", "json: an object a line, with the request's id", ("text", "json"))


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
    """One run's settings, fields of the last class first; `check()` says which value cannot be."""

    @property
    def tiers(self) -> str:
        """What brings KV to HBM, and may keep it below, as it was asked for; "" where nothing does."""
        names = "dram_tokens", "disk_tokens", "pool", "peer_fetch"
        return " ".join(f"--{name}={getattr(self, name)}" for name in names if getattr(self, name))

    def check(self) -> None:
        """Raises ConfigError naming the first setting that cannot be, with its value."""
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
    """Ascending positive integers of "128,512"; ConfigError otherwise."""
    try:
        numbers = tuple(int(part) for part in text.split(",") if part)
    except ValueError as error:
        raise ConfigError(f"--{name} is {text!r}, must be numbers as in 128,512") from error
    if list(numbers) != sorted(set(numbers)) or (numbers and numbers[0] < 1):
        raise ConfigError(f"--{name} is {text!r}, must be positive and ascending")
    return numbers
