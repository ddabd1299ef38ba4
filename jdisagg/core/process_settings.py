"""Settings of the processes around what runs: clusters, servers, and runs that end by themselves."""

from __future__ import annotations

from dataclasses import dataclass

from jdisagg.core.setting import everyday, setting


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
    kv_listen: str = everyday("127.0.0.1:0", "cluster", "HOST:PORT where others pull KV; port 0: any free one")
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
    record_dir: str = everyday("", "running", "keep the journal of every event here, for jdisagg.commands.replay")
    compile_cache_dir: str = everyday("auto", "running", "folder of compiled programs, for the next start; auto: in"
                                     " the user's cache folder; off: none; only:DIR: aot --save's alone")  # fmt: skip
    log_level: str = everyday("warning", "running", "of the servers; info: also a line for every HTTP request",
                             ("debug", "info", "warning", "error"))  # fmt: skip
    log_format: str = setting("text", "running", "json: an object a line, with the request's id", ("text", "json"))
