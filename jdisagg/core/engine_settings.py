"""Settings of what runs: the model, its devices and sizes, and the ways of its KV."""

from __future__ import annotations

from dataclasses import dataclass

from jdisagg.core.router_config import RESERVE_TOKENS
from jdisagg.core.setting import everyday, setting

TOOL_PARSERS = (
    *("auto", "off", "hermes", "llama3", "llama4", "mistral", "deepseek", "gemma4", "phi4", "functools"),
    *("qwen3_coder", "glm", "dsml", "kimi_k2", "kimi_k3", "gpt_oss"),
)
REASONING_PARSERS = ("auto", "off", "think", "mistral", "gemma4", "kimi_k3", "gpt_oss")


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
                             " sim, plan: 256 a stage where the device has no data sheet)")  # fmt: skip
    max_num_batched_tokens: int = everyday(
        0,
        "sizes",
        "tokens of one step: prompts', and a row a slot where steps mix both; 0: chosen (512 on the CPU;"
        " sim: 2,048 where the device has no data sheet)",
    )
    max_chunk_seqs: int = setting(0, "sizes", "sequences packed into one prefill chunk; 0: chosen (8 on the CPU)")
    page_size: int = everyday(
        0, "sizes", "tokens a KV page; 0: chosen (32 on CPU and GPU; sim: 16 without a data sheet)"
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
    decode_turns: int = setting(0, "scheduling", "most tokens of each row that a step of a ring or of stages"
                                " draws; fewer where somebody waits or pages are short; 0: 32 of one stage that"
                                " only decodes, 1 on CPUs and of several stages, else 8")  # fmt: skip
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
