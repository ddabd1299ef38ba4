"""`python -m tests.explore loss=1 dup=1`: every state of a small world, with more going wrong than the tests allow.

Words are key=value: fields of the budget (loss, dup, late, early, restart, lose, reboot, again, cancel, stop, flip,
burst, fail), requests, both (1: workers that do both), transfer (whole, chunk, layer), pages, limit (states),
any_order (1), and walks (random walks in a larger world instead; seed is the first walk's).
"""

from __future__ import annotations

import sys
from typing import Any

from jdisagg.core.worker_config import TransferMode
from tests.explore.scenes import Budget, Scene, colocated, disaggregated
from tests.explore.search import explore
from tests.explore.story import tell
from tests.explore.walks import walk_many
from tests.explore.world import World


def scene_of(words: dict[str, str]) -> Scene:
    sizes: dict[str, Any] = {}
    if "transfer" in words:
        sizes["transfer"] = TransferMode(words["transfer"])
    if "pages" in words:
        sizes["num_pages"] = int(words["pages"])
    make = colocated if words.get("both") == "1" else disaggregated
    scene = make(int(words.get("requests", 1)), **sizes)
    budget = {name: int(words[name]) for name in Budget._fields if name in words}
    return scene.but(any_order=words.get("any_order") == "1", **budget)


def main(arguments: list[str]) -> int:
    words = dict(argument.split("=", 1) for argument in arguments)
    if "walks" in words:
        print(walk_many(int(words["walks"]), int(words.get("seed", 0))).line())
        return 0
    world = World(scene_of(words))
    found = explore(world, int(words.get("limit", 5_000_000)))
    print(tell(world, found) if found.violation else found.line())
    return bool(found.violation)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
