"""What the fronts (HTTP and gRPC) are configured with at start: limits, keys, and defaults of requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version

from jdisagg.policy.client_limits import Rates
from jdisagg.serve.frontends.adapters import Adapters
from jdisagg.serve.frontends.tools.asked import Parsers


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """Sizes are bytes or counts, times seconds. `None` switches the thing off unless said otherwise."""

    eos_ids: tuple[int, ...] | None = None  # tokens that end an answer; None: the tokenizer's own
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)  # SamplingParams fields of silent requests
    served_names: tuple[str, ...] = ()  # further names the model answers to
    api_key: str | None = None
    api_keys: Mapping[str, str] = field(default_factory=dict)  # more of them, by name
    admin_key: str | None = None  # of /admin; without one it is not there
    rates: Rates = field(default_factory=Rates)  # of each client
    max_body_bytes: int = 8 << 20
    max_connections: int = 1000  # each of HTTP and gRPC
    client_timeout_s: float = 30.0  # to ask for something, and to read what it was sent
    max_choices: int = 1024  # prompts times n of one HTTP request
    choices_at_once: int = 64  # of one HTTP request; the rest of its choices are submitted as these end
    max_stops: int = 64
    max_stop_chars: int = 256
    queue_timeout_s: float | None = None  # a request still queued then ends with HTTP 408
    no_grammars: str = ""  # why answers are held to no form; empty where they may be
    parsers: Parsers = field(default_factory=Parsers)  # of reasoning and calls of tools
    embeddings: str = "off"  # how prompts are pooled where a request does not say; off: they are not
    adapters: Adapters = field(default_factory=Adapters)  # that clients may ask for as models
    model_fingerprint: str = ""  # the short one of the model that is served; empty if it has none
    tracing: bool = False  # requests are traced, in the trace of whoever asked
    version: str = field(default_factory=lambda: version("jdisagg"))

    @property
    def fingerprint(self) -> str:
        """Returns OpenAI's `system_fingerprint`: the program's version and the model's fingerprint."""
        return "-".join(filter(None, ("jdisagg", self.version, self.model_fingerprint)))
