"""What is asked of a server: prompts and output lengths, drawn once from a seed. Knows no clock and no server."""

from __future__ import annotations

import random
from dataclasses import dataclass

FIRST_PLAIN_TOKEN = 300  # below lie special tokens and single bytes
WORDS = ("self", "return", "import", "class", "def", "None", "value", "name", "list", "index", "data", "file", "path")


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens, uniform from `low` to `high`, both included."""

    low: int
    high: int

    @staticmethod
    def parse(text: str) -> Lengths:
        """ "128" is always 128, "32:512" anything from 32 to 512. Raises ValueError with the text."""
        low, _, high = text.partition(":")
        try:
            lengths = Lengths(int(low), int(high or low))
        except ValueError as error:
            raise ValueError(f"lengths are {text!r}, must be as 128 or 32:512") from error
        if not 1 <= lengths.low <= lengths.high:
            raise ValueError(f"lengths are {text!r}, must start at 1 or more and not descend")
        return lengths

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


@dataclass(frozen=True, slots=True)
class Job:
    """One request to be made: token ids or text, and how many tokens must come back."""

    prompt: tuple[int, ...] | str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Where jobs are drawn from. Token ids lie in [FIRST_PLAIN_TOKEN, vocab_size); text is of `prompt` words."""

    prompt: Lengths
    output: Lengths
    vocab_size: int
    text: bool = False

    def draw(self, num_jobs: int, seed: str) -> list[Job]:
        """The same jobs for the same seed, on every machine."""
        rng = random.Random(seed)
        return [Job(self._prompt(rng), self.output.draw(rng)) for _ in range(num_jobs)]

    def _prompt(self, rng: random.Random) -> tuple[int, ...] | str:
        length = self.prompt.draw(rng)
        if self.text:
            return " ".join(rng.choice(WORDS) for _ in range(length))
        first = min(FIRST_PLAIN_TOKEN, self.vocab_size // 2)
        return tuple(rng.randrange(first, self.vocab_size) for _ in range(length))
