"""What the transfer benchmark makes of its cells, and that its slow link is as slow as it says."""

import time
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest

from benchmarks.transfer import Cell, SlowShipment, compared, medians, shares, tally, verdict
from jdisagg.engine.mesh_executor import MeshShipment
from jdisagg.kv.transport.config import EmulatedLink

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
    added_ms=2.0,
    whole_ms=30.0,
)


@dataclass
class Packed:
    """A shipment that is packed and there at once."""

    packed_bytes: int = 250_000

    def wait_packed(self) -> None:
        """At once."""

    def wait(self) -> None:
        """At once."""


def test_a_cell_of_several_rounds_is_the_median_of_each_of_its_figures():
    rounds = [[replace(CELL, exposed_ms=exposed, hidden_ms=10 - exposed)] for exposed in (1.0, 9.0, 2.0)]
    (cell,) = medians(rounds)
    assert (cell.exposed_ms, cell.hidden_ms, cell.mode) == (2.0, 8.0, "layer")


def test_what_a_transfer_adds_is_the_second_token_less_a_step_with_all_kv_there():
    whole = replace(CELL, mode="whole", hidden_ms=0.0, exposed_ms=40.0, first_step_ms=5.5)
    layer, other = compared([CELL, whole])
    assert (layer.added_ms, layer.whole_ms) == (1.5, 40.0)
    assert shares(layer) == {"second_token_ms": 7.0, "share": pytest.approx(1.5 / 40), "verdict": "met"}
    assert other.share == 1


def test_a_second_token_that_comes_sooner_than_after_a_whole_transfer_waits_for_nothing():
    whole = replace(CELL, mode="whole", exposed_ms=40.0, first_step_ms=9.0)
    assert compared([CELL, whole])[0].added_ms == 0


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({"added_ms": 4.0}, "missed"),
        ({"chunks": 3}, ""),  # too short for the target
        ({"wire_ms": 100.0}, ""),  # the link needs as long as prefill: nothing could hide it
        ({"mode": "whole"}, ""),  # the baseline
    ],
)
def test_the_target_is_held_only_where_it_applies(changed: dict[str, Any], wanted: str):
    assert verdict(replace(CELL, **changed)) == wanted


def test_the_tally_counts_only_cells_that_the_target_is_for():
    cells = [CELL, replace(CELL, added_ms=9.0), replace(CELL, chunks=1), replace(CELL, mode="whole")]
    assert tally(cells)[1] == "layer meets the target in 1 of the 2 cells where it applies"


def test_two_shipments_share_the_link_one_behind_the_other():
    link, began = EmulatedLink(0.1), time.monotonic()  # 0.1 Gbit/s: 250,000 bytes take 20 ms
    shipments = [SlowShipment(cast(MeshShipment, Packed()), link, []) for _ in range(2)]
    for shipment in shipments:
        shipment.wait_packed()
    for shipment in shipments:
        shipment.wait()
    assert time.monotonic() - began >= 0.04
