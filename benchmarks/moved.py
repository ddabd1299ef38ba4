"""What moved between two results of one benchmark: every number in them, by its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

APART = ("date", "command", "machine", "versions", "load_average_after", "live_runs", "rounds")  # told, or of one run
NAMING = ("concurrency", "streams", "page_size", "chunks", "gbit_per_s", "nbytes", "workers", "requests", "round")
SHARE = 0.1


def moved(last: Mapping[str, Any], now: Mapping[str, Any], share: float = SHARE) -> list[str]:
    """A line for each number that changed by more than `share` of what it was, the largest change first."""
    before, after = dict(numbers(last)), dict(numbers(now))
    changes = [
        (abs(after[place] / value - 1), f"{place}: {value:.4g} -> {after[place]:.4g} ({after[place] / value - 1:+.0%})")
        for place, value in before.items()
        if place in after and value
    ]
    return [line for change, line in sorted(changes, reverse=True) if change > share]


def numbers(report: Any, place: str = "") -> Iterator[tuple[str, float]]:
    """(place, number) of all; an item of a list is named by its words and by what tells it from others."""
    if isinstance(report, bool):
        return
    if isinstance(report, int | float):
        yield place, float(report)
    elif isinstance(report, Mapping):
        for key, value in report.items():
            if key not in APART:
                yield from numbers(value, f"{place}.{key}" if place else key)
    elif isinstance(report, list):
        for index, item in enumerate(report):
            yield from numbers(item, f"{place}[{name_of(item, index)}]")


def name_of(item: Any, index: int) -> str:
    if not isinstance(item, Mapping):
        return str(index)
    words = [str(value) for key, value in item.items() if isinstance(value, str) or key in NAMING]
    return " ".join(words) or str(index)
