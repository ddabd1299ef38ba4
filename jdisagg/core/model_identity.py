"""The identity of a model: equal on two machines if and only if both run the same bytes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

FINGERPRINT_DIGITS = 32
SHORT_DIGITS = 12  # as /health, the banner and refusals show it


def config_digest(config: Any) -> str:
    """Returns 32 hexadecimal digits of a configuration (a dataclass): programs follow from it and not from weights."""
    text = json.dumps(asdict(config), sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=FINGERPRINT_DIGITS // 2, person=b"jdisagg config").hexdigest()


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Names one model by the digests of its bytes.

    KV, records and processes of two identities never mix, whatever the models are called.
    """

    weights: str  # digest of every byte of the weights, or of what random weights are made from
    config: str  # digest of the configuration, as its files hold it and as this program reads it
    tokenizer: str = ""  # digest of the tokenizer's files; empty for a draft model, which has none
    weights_version: int = 0  # counts updates of the weights since they were loaded

    @property
    def fingerprint(self) -> str:
        """Returns 32 hexadecimal digits that stand for all fields."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=FINGERPRINT_DIGITS // 2, person=b"jdisagg model").hexdigest()

    @property
    def short(self) -> str:
        """Returns the first 12 digits of the fingerprint."""
        return self.fingerprint[:SHORT_DIGITS]

    def described(self, name: str) -> str:
        """Returns one line that names the model and every part, so that a refusal shows which of them differs."""
        parts = f"weights {self.weights[:SHORT_DIGITS]}, config {self.config[:SHORT_DIGITS]}"
        parts += f", tokenizer {self.tokenizer[:SHORT_DIGITS] or 'none'}"
        parts += f", version {self.weights_version}" if self.weights_version else ""
        return f"{name}:{self.short} ({parts})"
