"""How long a worker's decode steps take, by the tokens of their drafts and the width of their tables: as measured, and
as thought where too few have ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

KEPT = 17  # last times of a program; their lower quartile counts, for what else a machine does only adds
SELDOM = 4  # times after which what is usual is made out anew where as many are known as are kept
ENOUGH = 2  # times of a program, before anything is compared to them
STALE = 200  # times of all programs, after which one is forgotten when a new one of its own comes
DOUBT = 0.97  # what is left of how much longer than thought a program's only time was, with each other time


def usual(times: Collection[float]) -> float:
    """The lower quartile."""
    return sorted(times)[len(times) // 4]


class ProgramTimes:
    """Of one worker: what is usual of the last ones."""

    def __init__(self, turns: int = 1) -> None:
        """turns: of a plain step; the more, the seldomer one is taken where drafts pay."""
        self._stale = STALE * turns
        self._last: dict[tuple[int, int], deque[tuple[int, float]]] = {}  # how many had been learnt by then, seconds
        self._usual: dict[tuple[int, int], float] = {}
        self._plain: dict[int, float] = {}
        self._count = 0

    def learn(self, drafts: int, table_pages: int, seconds: float) -> None:
        """What is told of other times, busier or idler ones, is forgotten."""
        self._count += 1
        program = drafts, table_pages
        last = self._last.setdefault(program, deque())
        last.append((self._count, seconds))
        if len(last) > KEPT and self._count % SELDOM:
            last.popleft()
            return
        while len(last) > KEPT or last[0][0] <= self._count - self._stale:
            last.popleft()
        self._usual[program] = usual([each for _, each in last])
        plain_s = self._known(0, table_pages)
        if plain_s is not None:
            longer = [
                known for size, width in self._last if width == table_pages and (known := self._known(size, width))
            ]
            self._plain[table_pages] = min([plain_s, *longer])

    def plain_s(self, table_pages: int) -> float | None:
        """Of a step of one token a row; None where too few have ended. It is no longer than one that does more: plain
        ones are rare where drafts pay, and the machine may have been busy just then."""
        return self._plain.get(table_pages)

    def plain_times(self, table_pages: int) -> int:
        """How many it is known by; as good as one where steps that do more were quicker."""
        doubtful = self._plain.get(table_pages, 0.0) < self._usual.get((0, table_pages), 0.0)
        return 1 if doubtful else len(self._last.get((0, table_pages), ()))

    def _known(self, drafts: int, table_pages: int) -> float | None:
        program = drafts, table_pages
        return self._usual[program] if len(self._last.get(program, ())) >= ENOUGH else None

    def knows(self, drafts: int, table_pages: int) -> bool:
        """Whether enough of them have ended."""
        return self._known(drafts, table_pages) is not None

    def draft_s(self, drafts: int, table_pages: int) -> float:
        """Of one that verifies drafts, where plain ones are known. A program's only time may have been the machine's
        doing: what it was longer than thought is believed less and less, until there is another."""
        known = self._known(drafts, table_pages)
        if known is not None:
            return known
        thought_s = self._thought_s(drafts, table_pages)
        for count, seconds in self._last.get((drafts, table_pages), ()):
            return min(seconds, thought_s + (seconds - thought_s) * DOUBT ** (self._count - count))
        return thought_s

    def _thought_s(self, drafts: int, table_pages: int) -> float:
        """As much longer as with another width of tables; else as drafts of another length, by their rows, of fewer by
        half of them; else as if
        every second token took a step."""
        plain_s = self.plain_s(table_pages)
        assert plain_s is not None, "plain steps come first"
        ratios = [
            known / other_s
            for size, width in self._last
            if size == drafts and (known := self._known(size, width)) and (other_s := self.plain_s(width))
        ]
        if ratios:
            return plain_s * max(ratios)
        longer = [
            (known - plain_s) * max((1 + drafts / size) / 2, drafts / size)
            for size, width in self._last
            if size and width == table_pages and (known := self._known(size, width))
        ]
        return plain_s + (max(0.0, *longer) if longer else plain_s * drafts / 2)
