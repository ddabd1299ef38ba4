"""Tables of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def cell(text: object) -> str:
    """One line without a bar."""
    return " ".join(str(text).split()).replace("|", "\\|")


def row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(cell, cells)) + " |"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    return "\n".join([row(head), "|" + "---|" * len(head), *map(row, rows)])
