"""How the chips of a TPU slice are joined: a mesh whose axes close to rings where they are long enough.

A collective over chips that fill a box uses the links of all the box's axes at once, both ways round those that close
(colours of XLA's own rings; Austin et al., "How to Scale Your Model", parts 2 and 3). Elsewhere one link is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from jdisagg.core.targets import Target

# Closed by optical switches, cube by cube (v4, v5p, v7x); a plane's only where it spans a pod (v5e, v6e).
CUBE, POD = 4, 16


@dataclass(frozen=True, slots=True)
class Joined:
    """What a group of devices has between them. links: of a device, that one collective sends over at once. hops: from
    one device to the farthest."""

    links: int = 1
    hops: int = 0


def closes(target: Target, axis: int) -> bool:
    """Whether the last chip of the slice's axis is the first one's neighbour."""
    side = target.sides[axis]
    return side % CUBE == 0 if len(target.sides) == 3 else side == POD


def joined(target: Target, places: Sequence[tuple[int, ...]]) -> Joined:
    """Chips at these places of a slice. GPUs' links are one switch's, which all of them reach."""
    if target.chip.gpu is not None or len(set(places)) < 2:
        return Joined()
    axes = [sorted({place[axis] for place in places}) for axis in range(len(target.sides))]
    if prod(map(len, axes)) != len(set(places)):
        return Joined(1, len(set(places)) - 1)
    rings = [closes(target, axis) and len(taken) == target.sides[axis] for axis, taken in enumerate(axes)]
    links = sum((2 if ring else 1) for taken, ring in zip(axes, rings, strict=True) if len(taken) > 1)
    hops = sum(len(taken) // 2 if ring else len(taken) - 1 for taken, ring in zip(axes, rings, strict=True))
    return Joined(links, hops)
