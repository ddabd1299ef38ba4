"""What `--speculative` says: where the tokens come from that a step verifies, and how many."""

from __future__ import annotations

from dataclasses import dataclass

from jdisagg.core.errors import FlagError

DRAFT_TOKENS = 3
KINDS = ("ngram", "auto", "grammar")


@dataclass(frozen=True, slots=True)
class Speculation:
    """Tokens of a draft, 0 for none; whether they are guessed of any row's, or come of grammars alone; and whether
    they are verified only where that is faster."""

    tokens: int = 0
    guesses: bool = True
    auto: bool = False


def read_speculation(said: str) -> Speculation:
    """Of off, or a kind, or as many tokens as ngram:5 says. Raises FlagError."""
    kind, _, number = said.partition(":")
    if said == "off":
        return Speculation()
    if kind not in KINDS or (number and not number.isdecimal()) or number in ("0", "00"):
        raise FlagError(
            f"--speculative={said}: say off, {', '.join(KINDS)}, or ngram:N for N tokens instead of {DRAFT_TOKENS}"
        )
    return Speculation(int(number or DRAFT_TOKENS), kind != "grammar", kind == "auto")
