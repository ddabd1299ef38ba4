"""The interface of a running stack that the front ends (HTTP, gRPC, the `LLM` class) use: requests in, updates out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from jdisagg.core.errors import JdisaggError
from jdisagg.core.events import Finish
from jdisagg.core.messages import NO_TOKENS, TokenDelta
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.request import FinishReason, Request, RequestId
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.serve.deploy.pools import Pools


class Rejected(JdisaggError):
    """The queue is full; try again after `retry_after_s` seconds (HTTP 429)."""

    def __init__(self, detail: str, retry_after_s: float) -> None:
        super().__init__(detail)
        self.retry_after_s = retry_after_s


class ObjectiveUnmet(Rejected):
    """The request would probably miss its `ttft_s` or `tpot_s`; looser objectives or a retry may succeed (429)."""


class Draining(JdisaggError):
    """The server is shutting down and takes no new requests (HTTP 503)."""


class NotLeader(JdisaggError):
    """This router is a standby and serves no requests; the leader does, at the addresses it names (HTTP 503)."""

    def __init__(self, http: str = "", grpc: str = "") -> None:
        served = [f"{name} at {address}" for name, address in (("HTTP", http), ("gRPC", grpc)) if address]
        where = f"the leader serves {' and '.join(served)}" if served else "no leader is known yet"
        super().__init__(f"this router is a standby; {where}")
        self.http = http


@dataclass(frozen=True, slots=True)
class Update:
    """The sampled tokens of one request since its last update; the last update has `finish`."""

    delta: TokenDelta = NO_TOKENS
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class Capacity:
    """Upper bounds of a stack: sequences decoded at once, and the shortest seconds per token."""

    slots: int
    token_s: float = 0.0  # 0 if nothing was measured yet

    def least_s(self, answers: int, tokens: int) -> float:
        """Returns the least seconds until the last of `answers` starts, each of `tokens` tokens, on an idle stack."""
        return (answers - 1) // self.slots * tokens * self.token_s


class Service(Protocol):
    """The interface of a running stack. All methods are called on the event loop."""

    model_name: str
    model_config: ModelConfig
    max_model_len: int
    tokenizer: Tokenizer
    draining: bool
    pools: Pools
    sampling_defaults: dict[str, float]  # the model's values for what a request leaves out

    @property
    def ready(self) -> bool: ...  # True if new requests are accepted

    @property
    def alive(self) -> bool: ...  # False once the driver has died; the process is then about to exit

    def now_s(self) -> float: ...  # seconds of the driver's clock, for `Request.arrival_s`

    def stream(self, request: Request) -> AsyncGenerator[Update]:
        """Yields updates until one has `finish`.

        Closing the generator early cancels the request and frees its resources.

        Raises RequestError (bad request), Rejected or Draining before the first update.
        """
        ...

    def capacity(self) -> Capacity | None: ...  # None if it is not known

    def cancel(self, request_id: RequestId, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends the request with `reason`: STOP if a stop string completed its answer."""
