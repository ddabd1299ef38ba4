"""A language for tests of machines: even tokens only, and at the end of six of them nothing more."""

from collections.abc import Sequence

import numpy as np

from jdisagg.model.grammars.grammars import mask_words


class EvensMatcher:
    """Implements `Matcher`."""

    def __init__(self, words: int) -> None:
        self.words, self.taken = words, list[int]()

    def take(self, tokens: Sequence[int]) -> None:
        self.taken += tokens

    def fill(self, mask: np.ndarray) -> None:
        good = len(self.taken) < 6 and all(token % 2 == 0 for token in self.taken)
        mask[:] = 0x55555555 if good else 0


class Evens:
    """Implements `Grammars`."""

    def __init__(self, vocab_size: int) -> None:
        self.words = mask_words(vocab_size)

    def why_not(self, grammar: str) -> str:
        return ""

    def start(self, grammar: str) -> EvensMatcher:
        return EvensMatcher(self.words)
