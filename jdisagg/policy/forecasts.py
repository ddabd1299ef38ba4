"""What a request is predicted to meet on each worker and each link, in seconds, from what was measured of late."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from jdisagg.core.request import Request, WorkerId
from jdisagg.policy.choice import Forecast, WorkerSnapshot
from jdisagg.policy.drain import Drain
from jdisagg.policy.fallback import run_tokens
from jdisagg.policy.link_speeds import LinkSpeeds, kv_bytes
from jdisagg.policy.pace import Figures, Pace
from jdisagg.policy.worker_state import WorkerState

PROMPT_TOKEN_S = 1e-4  # of a prompt token, where nothing was measured anywhere
STEP_S = 0.02  # of a decode step with nobody else in it, so


@dataclass(slots=True)
class Forecasts:
    """Makes them; learns from transfers. A step with every slot taken is held to be twice as long as a lone one's."""

    peers: Mapping[WorkerId, WorkerState]
    pace: Pace
    short_weight: float  # a prompt token on a worker that decodes, in those of one that does not
    links: LinkSpeeds = field(default_factory=LinkSpeeds)
    steps: Figures = field(default_factory=Figures)  # of decode workers, as if alone
    drain: Drain = field(default_factory=Drain)  # of lines of prompts

    def shipped(self, prefill: WorkerId, decode: WorkerId, tokens: int, seconds: float) -> None:
        """The KV of so many tokens took so long."""
        source, destination = self.peers.get(prefill), self.peers.get(decode)
        if source is not None and destination is not None and source is not destination:
            self.links.learn(source.config, destination.config, kv_bytes(destination.config, tokens), seconds)

    def decoded(self, decode: WorkerId, gap_s: float, now_s: float) -> None:
        """A request's mean gap there, beside as many others as are there now."""
        if decode in self.peers:
            self.steps.learn(decode, gap_s / _crowd(self.peers[decode], 0), now_s)

    def forget(self, worker: WorkerId) -> None:
        """It is gone."""
        self.links.forget(worker)
        self.steps.forget(worker)
        self.drain.forget(worker)

    def of(self, request: Request, now_s: float) -> Forecast:
        """For one request, by what is known now."""
        output = max(0.0, self.pace.expected_tokens(request.sampling.max_tokens, now_s) - 1)
        waited_s = max(0.0, now_s - request.arrival_s)
        usual_prompt_s = self.pace.prompt.usual(now_s) or PROMPT_TOKEN_S
        usual_step_s = self.steps.usual(now_s) or STEP_S
        least_byte_s, configs = self.links.least_byte_s, {name: peer.config for name, peer in self.peers.items()}

        def prompt_s(worker: WorkerId) -> float:
            return self.pace.prompt.of(worker, now_s) or usual_prompt_s

        def line_s(worker: WorkerId) -> float:
            """A prompt token of a line: prompts that share a step each take all of its time, and the line does not."""
            drained_s, alone_s = self.drain.of(worker, now_s), prompt_s(worker)
            return alone_s if drained_s is None else min(alone_s, drained_s)

        def prefill(look: WorkerSnapshot, tokens: int) -> float:
            config = configs[look.worker]
            weight = 1.0 if config.role.prefills else self.short_weight
            return weight * run_tokens(tokens, config.prefill_buckets) * line_s(look.worker)

        def decode(look: WorkerSnapshot) -> float:
            alone_s = self.steps.of(look.worker, now_s) or usual_step_s
            return output * alone_s * _crowd(self.peers[look.worker], 1)

        return Forecast(
            queue=lambda look: waited_s + self.peers[look.worker].prompt_tokens * line_s(look.worker),
            prefill=prefill,
            transfer=lambda source, destination, tokens: (
                kv_bytes(configs[destination], tokens) * self.links.byte_s(configs[source], configs[destination])
            ),
            least_transfer=lambda destination, tokens: kv_bytes(configs[destination], tokens) * least_byte_s,
            decode=decode,
            ttft_s=math.inf if request.ttft_s is None else request.ttft_s,
            later_s=math.inf if request.tpot_s is None else output * request.tpot_s,
        )


def crowd(sequences: int, slots: int) -> float:
    """How many times longer a step of so many is than one of none."""
    return 1 + sequences / slots


def _crowd(peer: WorkerState, more: int) -> float:
    return crowd(len(peer.decode_work) + more, peer.config.num_slots)
