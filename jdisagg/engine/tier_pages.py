"""A worker's pages on their way to records below HBM, and back: what `kv/tiers` is to its devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jdisagg.core.layout.kv_layout import NULL_PAGE, DraftPages
from jdisagg.core.layout.reshard import plan_transfer
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.kv.pools import PagesOfStage
from jdisagg.kv.shipping import LandedKV, PackedKV, TransferPrograms, pack_pages, shapes_of
from jdisagg.kv.tiers.records import RecordLayout, fill_records, land_records
from jdisagg.parallel.submesh import Submesh


@dataclass(frozen=True)
class PackedPages:
    """Pages that were packed in program order."""

    form: RecordLayout
    packed: list[PackedKV]
    count: int
    error_bound: float

    def read(self) -> tuple[np.ndarray, bool]:
        """(u8[n, record_bytes], whether they may be kept); blocks until the devices have packed them."""
        records = self.form.empty(self.count)
        return records, fill_records(self.form, records, self.packed, self.error_bound)


class TierPages:
    """Of one worker."""

    def __init__(
        self,
        config: WorkerConfig,
        stages: Sequence[PagesOfStage],
        programs: Mapping[Submesh, TransferPrograms],
        draft: DraftPages | None = None,
    ) -> None:
        """draft: whose pages the last of the stages has."""
        self.config, self.stages, self.programs = config, stages, dict(programs)
        self.form = RecordLayout(stages[0].layout, config.tier_wire, config.digests, draft)

    def pack(self, pages: Sequence[int]) -> PackedPages:
        """Packs the pages now, in program order; returns at once."""
        wire = self.config.tier_wire
        packed = pack_pages(self.stages, self.programs, self.form.shapes, pages, pages, wire=wire)
        return PackedPages(self.form, packed, len(pages), self.config.error_bound)

    def land(self, pages: Sequence[int], records: np.ndarray, good: Sequence[bool]) -> list[LandedKV]:
        """Starts records on their way to the devices, for these pages; those that are not good go nowhere."""
        places = [page if fine else NULL_PAGE for page, fine in zip(pages, good, strict=True)]
        if not all(good):
            records[np.flatnonzero(~np.array(good))] = 0
        shapes, number = shapes_of(self.stages), len(pages)
        plan = plan_transfer(self.form.shapes, shapes, self.form.layout.num_kv_heads, (number, number))
        return land_records(self.form, records, places, self.stages, plan.moves)
