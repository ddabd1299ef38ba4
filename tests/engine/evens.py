"""Languages for tests of machines: even tokens only, and at the end of six of them nothing more; and tokens by fours,
of which the first says the others."""

from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from jdisagg.model.grammars.grammars import GrammarState, mask_words


class EvensMatcher:
    """Implements `Matcher`."""

    def __init__(self, words: int) -> None:
        self.words, self.taken = words, list[int]()

    def take(self, tokens: Sequence[int]) -> None:
        self.taken += tokens

    def undo(self, count: int) -> None:
        del self.taken[len(self.taken) - count :]

    def forced(self) -> list[int]:
        return []

    def follows(self, tokens: Sequence[int]) -> int:
        room = max(0, 6 - len(self.taken)) if all(token % 2 == 0 for token in self.taken) else 0
        return len(list(takewhile(lambda token: token % 2 == 0, tokens[:room])))

    def fill(self, mask: np.ndarray) -> None:
        good = len(self.taken) < 6 and all(token % 2 == 0 for token in self.taken)
        mask[:] = 0x55555555 if good else 0


class Evens:
    """Implements `Grammars`."""

    def __init__(self, vocab_size: int) -> None:
        self.words = mask_words(vocab_size)

    def why_not(self, grammar: str) -> str:
        return ""

    def start(self, grammar: str) -> GrammarState:
        return EvensMatcher(self.words)


BY_FOURS = 4


class FoursMatcher:
    """Implements `Matcher`."""

    def __init__(self, words: int) -> None:
        self.words, self.taken = words, list[int]()

    def take(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            assert token in (self.forced()[:1] or [token]), f"{token} is not what comes after {self.taken}"
            self.taken.append(token)

    def undo(self, count: int) -> None:
        del self.taken[len(self.taken) - count :]

    def forced(self) -> list[int]:
        place = len(self.taken) % BY_FOURS
        return [self.taken[-place] % 40 + each for each in range(place, BY_FOURS)] if place else []

    def follows(self, tokens: Sequence[int]) -> int:
        taken, count = [*self.taken], 0
        for token in tokens:
            if token not in (self.forced()[:1] or [token]):
                break
            self.taken.append(token)
            count += 1
        self.taken = taken
        return count

    def fill(self, mask: np.ndarray) -> None:
        forced = self.forced()
        mask[:] = 0 if forced else 0xFFFFFFFF
        if forced:
            mask[forced[0] // 32] = 1 << forced[0] % 32


class Fours(Evens):
    """Implements `Grammars`."""

    def start(self, grammar: str) -> GrammarState:
        return FoursMatcher(self.words)


class NoFifthsMatcher(FoursMatcher):
    """Implements `Matcher`: any token may come but multiples of five."""

    def take(self, tokens: Sequence[int]) -> None:
        assert all(token % 5 for token in tokens)
        self.taken += tokens

    def forced(self) -> list[int]:
        return []

    def follows(self, tokens: Sequence[int]) -> int:
        return len(list(takewhile(lambda token: token % 5, tokens)))

    def fill(self, mask: np.ndarray) -> None:
        bits = np.arange(32 * self.words) % 5 > 0
        mask[:] = np.packbits(bits, bitorder="little").view(np.uint32)


class NoFifths(Evens):
    """Implements `Grammars`."""

    def start(self, grammar: str) -> GrammarState:
        return NoFifthsMatcher(self.words)
