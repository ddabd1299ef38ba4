"""How groups of chips are joined within a slice."""

import pytest

from jdisagg.core.hardware import Joined, Target, joined


def box(*sides: range) -> list[tuple[int, ...]]:
    xs, ys, zs = sides
    return [(x, y, z) for z in zs for y in ys for x in xs]


@pytest.mark.parametrize(
    ("target", "places", "found"),
    [
        ("v5p:2x2x2", box(range(2), range(2), range(2)), Joined(3, 3)),
        ("v5p:2x2x4", box(range(2), range(1), range(1)), Joined(1, 1)),
        ("v5p:2x2x4", box(range(2), range(2), range(4)), Joined(4, 4)),  # the third axis closes
        ("v5p:2x2x4", box(range(2), range(2), range(2)), Joined(3, 3)),  # half of it does not
        ("v5e:4x4", box(range(4), range(4), range(1)), Joined(2, 6)),
        ("v5e:2x4", box(range(2), range(4), range(1)), Joined(2, 4)),
        ("v6e:16x16", box(range(16), range(16), range(1)), Joined(4, 16)),
        ("v7x:2x2x1", [place for place in box(range(2), range(2), range(1)) for _ in range(2)], Joined(2, 2)),
        ("v5e:4x4", [(0, 0, 0), (1, 0, 0), (2, 0, 0), (0, 1, 0)], Joined(1, 3)),  # no box
        ("h100:8", [(0, 0, each) for each in range(8)], Joined()),
        ("v5e:4x4", [(0, 0, 0)], Joined()),
    ],
)
def test_a_box_of_chips_uses_the_links_of_all_its_axes(target, places, found):
    assert joined(Target.parse(target), places) == found
