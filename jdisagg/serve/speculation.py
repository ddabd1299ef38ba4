"""What `--speculative` says: where the tokens come from that a step verifies, how many, and when."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jdisagg.core.errors import FlagError
from jdisagg.core.model_config import ModelConfig
from jdisagg.model.checkpoint import read_sharing_vocabulary

DRAFT_TOKENS = 3
OWN = "draft"  # the draft that lies with a model, in a folder of this name
KINDS = ("ngram", "auto", "grammar", OWN)


@dataclass(frozen=True, slots=True)
class Speculation:
    """Tokens of a draft, 0 for none; whether they are guessed of any row's, or come of grammars alone; whether they are
    verified only where that is faster; and the model that guesses them, "" where n-grams do."""

    tokens: int = 0
    guesses: bool = True
    auto: bool = False
    draft: str = ""


def read_speculation(said: str) -> Speculation:
    """Of off, or KIND[:MODEL][:N]. Raises FlagError."""
    kind, *rest = said.split(":")
    if said == "off":
        return Speculation()
    number = rest.pop() if rest and rest[-1].isdecimal() else str(DRAFT_TOKENS)
    model = ":".join(rest) or (OWN if kind == OWN else "")
    named = kind in (OWN, "auto")
    if kind not in KINDS or int(number) == 0 or said.endswith(":") or (model and not named):
        raise FlagError(
            f"--speculative={said}: say off, {', '.join(KINDS)}, draft:MODEL, auto:MODEL, or one of them with :N"
            f" for N tokens instead of {DRAFT_TOKENS}"
        )
    return Speculation(int(number), kind != "grammar", kind == "auto", model)


def read_draft(said: str, model_folder: Path, model: ModelConfig) -> tuple[Path, ModelConfig] | None:
    """Where the model lies that guesses, and its numbers; None where none does. Raises FlagError, CheckpointError where
    there is none, ConfigError where its tokens are not the other's."""
    draft = read_speculation(said).draft
    if not draft:
        return None
    folder = model_folder / OWN if draft == OWN else Path(draft)
    return folder, read_sharing_vocabulary(folder, model.vocab_size, f"--speculative={said}: {folder}")
