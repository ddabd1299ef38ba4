"""How a suite of this folder says what it was held to: a gate is a target, its band, and what came out.

    hold(relative("vLLM on RTX 4090: mean TTFT, s", published=65.5, ours=66.1, share=0.10))
    hold(in_order("Mooncake Fig. 5", "global < local < random", ours, right=found), miss="the router knows no prefix")

`hold` books the gate for the table (`python -m tests.published.table`) and then passes or fails the test. A miss that
is known and explained by `miss` is booked with that reason and marks its test as an expected failure; the day it comes
into its band the test fails, so that the reason goes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

WITHIN, OUTSIDE = "within", "outside"


@dataclass(frozen=True)
class Gate:
    """One row of the table. `target` says whose figure it is, and in which unit; figures are numbers or words."""

    target: str
    published: float | str
    ours: float | str
    band: str
    verdict: str  # WITHIN or OUTSIDE
    note: str = ""  # a line at most; of a miss, why

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        figures = f"published {shown(self.published)}, ours {shown(self.ours)}"
        return f"{self.target}: {figures}, {self.band}: {self.verdict}{note}"


GATES: list[Gate] = []  # held so far, in the order of the tests


def relative(target: str, published: float, ours: float, share: float, note: str = "") -> Gate:
    """Ours within `share` (0.1 is ten percent) of what was published."""
    return Gate(
        target, published, ours, f"±{100 * share:g} %", _verdict(abs(ours - published) <= share * abs(published)), note
    )


def absolute(target: str, published: float, ours: float, width: float, note: str = "") -> Gate:
    """Ours no further than `width` from what was published, in the target's unit."""
    return Gate(target, published, ours, f"±{width:g}", _verdict(abs(ours - published) <= width), note)


def between(target: str, published: float | str, ours: float, low: float, high: float, note: str = "") -> Gate:
    """Ours from `low` to `high`, both included: bands that lie to one side, errors that have only an upper end."""
    return Gate(target, published, ours, f"{low:g} to {high:g}", _verdict(low <= ours <= high), note)


def in_order(target: str, published: str, ours: str, right: bool, note: str = "") -> Gate:
    """A direction or an order, in words on both sides; `right` where they agree."""
    return Gate(target, published, ours, "order", _verdict(right), note)


def hold(gate: Gate, miss: str = "") -> None:
    """Books the gate and ends the test as it must end. With several in one test, the one that may miss comes last."""
    if miss and gate.verdict == OUTSIDE:
        gate = replace(gate, note=miss)
    GATES.append(gate)
    print(f"\n{gate}", end="")
    if gate.verdict == WITHIN:
        assert not miss, f"{gate.target} is within its band now; it was said to miss it: {miss}"
    elif miss:
        pytest.xfail(miss)
    else:
        pytest.fail(str(gate), pytrace=False)


def hold_all(gates: list[Gate]) -> None:
    """Several at once: all are booked before the first miss ends the test."""
    GATES.extend(gates)
    print("", *gates, sep="\n")
    missed = [str(gate) for gate in gates if gate.verdict == OUTSIDE]
    if missed:
        pytest.fail("\n".join(missed), pytrace=False)


def shown(figure: float | str) -> str:
    """Four digits of a number, or all before its point; words as they are."""
    if isinstance(figure, str):
        return figure
    return f"{figure:,.0f}" if abs(figure) >= 1e4 else f"{figure:.4g}"


def _verdict(right: bool) -> str:
    return WITHIN if right else OUTSIDE
