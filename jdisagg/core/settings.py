"""Everything a user can set, once: name, default, group and one line of help. Flags, TOML keys and `LLM(...)` arguments
are all made from these fields (see `jdisagg/flags.py` and `jdisagg/flags.py`)."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from jdisagg.core.engine_settings import (
    MeshSettings,
    ModelSettings,
    SchedulingSettings,
    SizeSettings,
    TierSettings,
    TransferSettings,
)
from jdisagg.core.errors import ConfigError, FlagError
from jdisagg.core.process_settings import ClusterSettings, OneShotSettings, RunningSettings, ServerSettings

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
    "decode_turns",
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
