"""What the fronts (HTTP, gRPC, the `LLM` class) know of a running stack: tokens in, updates out."""

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
    """`ttft_s` or `tpot_s` is predicted to be missed; less asked of it, or the same later, may do (HTTP 429)."""


class Draining(JdisaggError):
    """The server is going down and takes no new requests (HTTP 503)."""


class NotLeader(JdisaggError):
    """This router is a standby and serves no requests; the leader does, at the addresses it names (HTTP 503)."""

    def __init__(self, http: str = "", grpc: str = "") -> None:
        served = [f"{name} at {address}" for name, address in (("HTTP", http), ("gRPC", grpc)) if address]
        where = f"the leader serves {' and '.join(served)}" if served else "no leader is known yet"
        super().__init__(f"this router is a standby; {where}")
        self.http = http


@dataclass(frozen=True, slots=True)
class Update:
    """What became known of a request at once: tokens drawn, and with its last update, how it finished."""

    delta: TokenDelta = NO_TOKENS
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a stack can do at the most: sequences decoded at once, and the least time that a token may take."""

    slots: int
    token_s: float = 0.0  # 0: nothing was measured yet

    def least_s(self, answers: int, tokens: int) -> float:
        """Before the last of `answers` can begin, when each has `tokens` tokens or more and nobody else asks."""
        return (answers - 1) // self.slots * tokens * self.token_s


class Service(Protocol):
    """A running stack. All methods are called on the event loop."""

    model_name: str
    model_config: ModelConfig
    max_model_len: int
    tokenizer: Tokenizer
    draining: bool
    pools: Pools
    sampling_defaults: dict[str, float]  # what the model says where a client is silent

    @property
    def ready(self) -> bool:
        """New requests are taken."""
        ...

    @property
    def alive(self) -> bool:
        """False for good once the driver has died: the process is about to end."""
        ...

    def now_s(self) -> float:
        """The driver's clock, for Request.arrival_s."""
        ...

    def stream(self, request: Request) -> AsyncGenerator[Update]:
        """Updates until one has `finish`. Closing the generator early cancels the request and frees what it held.

        Raises RequestError (bad request), Rejected or Draining before the first.
        """
        ...

    def capacity(self) -> Capacity | None:
        """None where it is not known."""
        ...

    def cancel(self, request_id: RequestId, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends the request as `reason`: STOP where a stop string completes its answer."""
        ...
