"""Whether a request is better served by one worker of both roles than by a pair: a prediction, in seconds.

Apart, the two phases leave each other alone, and KV must travel. Together, nothing travels, and everybody who decodes
there waits while the prompt is computed. Which is more depends on the prompt, on the queues and on the hour.
"""

from __future__ import annotations

from dataclasses import dataclass

from jdisagg.core.worker_config import bucket


@dataclass(frozen=True, slots=True)
class PathEstimate:
    """One path to serve a request, as far as is known."""

    run_tokens: int  # of its prompt, as the worker that prefills runs them: programs are of declared sizes
    queue_tokens: float  # prompt tokens before it there
    prompt_token_s: float  # of that worker, a token run
    output_token_s: float  # of the worker that decodes, between two tokens of one sequence
    transfer_token_s: float = 0.0  # a prompt token, exposed
    disturbed: int = 0  # sequences that decode on the worker that prefills

    def parts(self, prompt_tokens: int, output_tokens: float) -> dict[str, float]:
        """Seconds of this request, and those that others lose by it."""
        prefill_s = self.run_tokens * self.prompt_token_s
        return {
            "queue": self.queue_tokens * self.prompt_token_s,
            "prefill": prefill_s,
            "transfer": prompt_tokens * self.transfer_token_s,
            "decode": output_tokens * self.output_token_s,
            "delay of others": self.disturbed * prefill_s,
        }


@dataclass(frozen=True, slots=True)
class Benefit:
    """What disaggregating is predicted to benefit."""

    apart: dict[str, float]  # seconds by part
    together: dict[str, float]

    @property
    def benefit_s(self) -> float:
        """Under zero: rather together."""
        return sum(self.together.values()) - sum(self.apart.values())

    @property
    def reason(self) -> str:
        """In words, with the parts that differ."""
        verb = "gains" if self.benefit_s >= 0 else "loses"
        parts = [
            f"{name} {_ms(self.apart[name])} against {_ms(self.together[name])}"
            for name in self.apart
            if self.apart[name] != self.together[name]
        ]
        return f"disaggregating {verb} {_ms(abs(self.benefit_s))}: " + (", ".join(parts) or "nothing differs")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def run_tokens(tokens: int, buckets: tuple[int, ...]) -> int:
    """Tokens that programs of these sizes (the last is a chunk's) run for a prompt by itself."""
    chunks, rest = divmod(tokens, buckets[-1])
    return chunks * buckets[-1] + (bucket(rest, buckets) if rest else 0)


def benefit_of(apart: PathEstimate, together: PathEstimate, prompt_tokens: int, output_tokens: float) -> Benefit:
    """What serving by a pair gains over serving by one worker. output_tokens: as expected."""
    return Benefit(apart.parts(prompt_tokens, output_tokens), together.parts(prompt_tokens, output_tokens))
