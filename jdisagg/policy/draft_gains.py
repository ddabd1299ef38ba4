"""What a step that verifies drafts is thought to gain, or to lose, beside plain ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jdisagg.policy.draft_records import expected_tokens
from jdisagg.policy.program_times import ProgramTimes

GUESSED, MEASURED = 0.25, 0.5  # of how much longer drafts are thought to take, or took: it may be as little by now
MARGIN = 0.03  # of a step with drafts, that it must gain: as much may be lost by what is not known


class Row(NamedTuple):
    """Of a step that is weighed."""

    rate: float  # how often a token of its draft is thought to be taken; 0: it has none
    weight: float  # what its tokens count for
    due_s: float = 0.0  # seconds for each token that it has left, of what a model is to read of it first


def gain_s(times: ProgramTimes, rows: Sequence[Row], size: int, table_pages: int, right: float = 1.0) -> float:
    """Seconds that plain steps would take longer for what rows draw of drafts, less a margin. right: what has come of
    what was thought to."""
    tokens = 1 + right * (mean_tokens(rows, size) - 1)
    longer_s = (1 + MARGIN) * times.draft_s(size, table_pages) + reading_s(rows, size)
    return tokens * (times.plain_s(table_pages) or 0.0) - longer_s


def might_gain_s(times: ProgramTimes, rows: Sequence[Row], size: int, table_pages: int) -> float:
    """So, where drafts take as little longer as may be."""
    plain_s = times.plain_s(table_pages) or 0.0
    longer_s = stake_s(times, size, table_pages) * (MEASURED if times.knows(size, table_pages) else GUESSED)
    return (mean_tokens(rows, size) - 1) * plain_s - longer_s - reading_s(rows, size)


def reading_s(rows: Sequence[Row], size: int) -> float:
    """Of what is to be read first, a step's share."""
    return sum([row.due_s * expected_tokens(row.rate, size) for row in rows if row.due_s])


def without_unread(rows: Sequence[Row], size: int, plain_s: float) -> list[Row]:
    """Those that gain less than their reading takes draw a token a step."""
    each_s = plain_s / len(rows)
    return [row if not row.due_s or _pays(row, size, each_s) else Row(0.0, row.weight) for row in rows]


def one_to_read(rows: Sequence[Row]) -> list[Row]:
    """Who is tried: those that need no reading; where all of them do, the one that takes least for what it has left."""
    least = min((row.due_s for row in rows if row.rate), default=0.0)
    first = next((at for at, row in enumerate(rows) if row.rate and row.due_s == least), 0)
    return [row if at == first or not row.due_s else Row(0.0, row.weight) for at, row in enumerate(rows)]


def _pays(row: Row, size: int, each_s: float) -> bool:
    tokens = expected_tokens(row.rate, size)
    return (tokens - 1) * each_s > tokens * row.due_s


def mean_tokens(rows: Sequence[Row], size: int) -> float:
    """That they draw."""
    tokens = sum([row.weight * (expected_tokens(row.rate, size) if row.rate else 1.0) for row in rows])
    return tokens / sum([row.weight for row in rows])


def stake_s(times: ProgramTimes, size: int, table_pages: int) -> float:
    """Seconds that are lost where not one token of a draft is taken, as far as anything is known."""
    plain_s = times.plain_s(table_pages)
    return 0.0 if plain_s is None else max(0.0, times.draft_s(size, table_pages) - plain_s)
