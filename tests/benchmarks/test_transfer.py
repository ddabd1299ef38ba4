"""What the transfer benchmark makes of its cells, and that its slow link is as slow as it says."""

import time
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import pytest

from benchmarks.transfer import Cell, SlowParcel, medians, shares, tally, verdict
from jdisagg.engine.mesh_machine import MeshParcel
from jdisagg.kv.transport.link import Link

CELL = Cell(
    gbit_per_s=1.0,
    chunks=4,
    mode="layer",
    prefill_ms=100.0,
    hidden_ms=28.0,
    exposed_ms=2.0,
    first_step_ms=5.0,
    ttft_ms=101.0,
    wire_ms=25.0,
)


@dataclass
class Packed:
    """A parcel that is packed and there at once."""

    packed: list[Any] = field(default_factory=lambda: [np.zeros(250_000, np.uint8)])

    def wait_packed(self) -> None:
        self.packed.sort(key=id)

    def wait(self) -> None:
        self.packed.sort(key=id)


def test_a_cell_of_several_rounds_is_the_median_of_each_of_its_figures():
    rounds = [[replace(CELL, exposed_ms=exposed, hidden_ms=10 - exposed)] for exposed in (1.0, 9.0, 2.0)]
    (cell,) = medians(rounds)
    assert (cell.exposed_ms, cell.hidden_ms, cell.mode) == (2.0, 8.0, "layer")


def test_the_exposed_share_is_of_the_whole_time_on_the_way():
    found = shares(CELL)
    assert found["exposed_share"] == pytest.approx(2 / 30)
    assert found["exposed_wire_share"] == pytest.approx(2 / 25)
    assert (found["second_token_ms"], found["verdict"]) == (7.0, "met")


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({"exposed_ms": 4.0}, "missed"),
        ({"chunks": 3}, ""),  # too short for the target
        ({"wire_ms": 100.0}, ""),  # the link needs as long as prefill: nothing could hide it
        ({"mode": "whole"}, ""),  # the baseline
    ],
)
def test_the_target_is_held_only_where_it_applies(changed: dict[str, Any], wanted: str):
    assert verdict(replace(CELL, **changed)) == wanted


def test_the_tally_counts_only_cells_that_the_target_is_for():
    cells = [CELL, replace(CELL, exposed_ms=9.0), replace(CELL, chunks=1), replace(CELL, mode="whole")]
    assert tally(cells)[1] == "layer meets the target in 1 of the 2 cells where it applies"


def test_two_parcels_share_the_link_one_behind_the_other():
    link, began = Link(0.1), time.monotonic()  # 0.1 Gbit/s: 250,000 bytes take 20 ms
    parcels = [SlowParcel(cast(MeshParcel, Packed()), link, []) for _ in range(2)]
    for parcel in parcels:
        parcel.wait_packed()
    for parcel in parcels:
        parcel.wait()
    assert time.monotonic() - began >= 0.04
