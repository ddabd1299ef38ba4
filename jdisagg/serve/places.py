"""Workers as people see them: where each stands and how its mesh is cut, of this process and of others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jdisagg.core.reshard import StageShape
from jdisagg.core.worker_config import WorkerConfig


@dataclass(frozen=True, slots=True)
class Place:
    """One worker that is there now. `stages`: those of its mesh, one behind the other; layer groups are none."""

    config: WorkerConfig
    stages: tuple[StageShape, ...] = ()
    remote: bool = False  # in another process
    leaving: bool = False  # it ends what it has, and is given nothing more

    def to_json(self) -> dict[str, Any]:
        config = self.config
        return {
            "worker": config.worker,
            "role": config.role.value,
            "remote": self.remote,
            "leaving": self.leaving,
            "page_size": config.page_size,
            "num_pages": config.num_pages,
            "num_slots": config.num_slots if config.role.decodes else 0,
            "labels": str(config.labels),
            "stages": [{"layers": [each.layers.start, each.layers.stop], "shards": each.tp} for each in self.stages],
        }


def place_of(
    config: WorkerConfig, groups: Sequence[StageShape], *, remote: bool = False, leaving: bool = False
) -> Place:
    """A worker whose pages lie in these groups of layers: each a stage, or all on one mesh. A draft's are none."""
    stages = tuple(each for each in groups if not each.draft)
    if config.pipeline_stages == config.ring_stages == 1 and len(stages) > 1:
        layers = range(stages[0].layers.start, stages[-1].layers.stop)
        stages = (StageShape(layers, stages[0].tp, stages[0].page_size, stages[0].dtype),)
    return Place(config, stages, remote, leaving)
