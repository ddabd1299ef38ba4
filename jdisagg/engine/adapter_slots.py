"""LoRA adapters on an executor's devices: a fixed number of slots, filled as steps need them.

A step names the adapters of its rows. Missing ones are loaded in program order, in place of adapters that no row of
this step needs; programs and shapes do not change. Steps in flight keep the adapters they were dispatched with.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from jdisagg.core.errors import CheckpointError
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.request import Adapter, SamplingParams
from jdisagg.engine.declaration import DeclaredProgram
from jdisagg.model.adapted_params import AdaptedParams, FactorTensor
from jdisagg.model.lora import MISSING, NONE, AdapterWeights, read_adapter
from jdisagg.parallel.submesh import WHOLE, RingMesh, StageMesh

log = logging.getLogger("jdisagg.adapters")


class FilledSlot(NamedTuple):
    """A layer group's factors with one slot refilled; `slot` becomes ready when that is done."""

    factors: list[Array]
    slot: Array


class SlotPrograms:
    """The program that fills an adapter slot of one layer group's factors, or of a ring's."""

    def __init__(self, params: AdaptedParams, mesh: StageMesh | RingMesh) -> None:
        self.params, self.mesh = params, mesh
        held = [each.spec() for each in params.factors]
        specs = held, WHOLE, [each.spec(new=True) for each in params.factors]
        results: tuple[list[PartitionSpec], PartitionSpec] = held, WHOLE
        self.fill = mesh.program(self._filled, specs, results, (0,))

    def _filled(self, factors: list[Array], slot: Array, new: list[Array]) -> tuple[list[Array], Array]:
        put = jax.lax.dynamic_update_index_in_dim
        pairs = zip(self.params.factors, factors, new, strict=True)
        return [put(held, one, slot, each.slot_axis) for each, held, one in pairs], slot[None]

    def declared(self, stage: int) -> DeclaredProgram:
        leaves: Sequence[FactorTensor] = self.params.factors
        whole = jax.ShapeDtypeStruct((), jnp.int32, sharding=self.mesh.sharding(WHOLE))
        batch = [each.struct() for each in leaves], whole, [each.struct(new=True) for each in leaves]
        moved = sum(each.dtype.itemsize * each.size for each in batch[2])
        return DeclaredProgram("adapter", stage, leaves[0].factor.room.slots, self.fill, batch, self.mesh,
                               traits=(len(leaves),), batch_bytes=2 * moved)  # fmt: skip

    def put(self, slot: int, weights: AdapterWeights) -> None:
        new = [each.new(weights) for each in self.params.factors]
        first, leaves = self.params.first, self.params.leaves
        filled = FilledSlot(*self.fill(leaves[first:], self.mesh.put(np.asarray(slot, np.int32)), new))
        leaves[first:] = filled.factors


def declared_fills(programs: Sequence[SlotPrograms | None]) -> list[DeclaredProgram]:
    """Declares the fill programs by stage; None in `programs`: the stage has no adapters."""
    return [each.declared(stage) for stage, each in enumerate(programs) if each is not None]


class AdapterSlots:
    """The adapter slots of one executor, alike on all its layer groups."""

    def __init__(self, model: ModelConfig, programs: Sequence[SlotPrograms], slots: int, max_rank: int) -> None:
        self.model, self.programs, self.max_rank = model, programs, max_rank
        self._slots: dict[Adapter, int] = {}  # least recently used first
        self._free = list(range(slots))
        self._unreadable: set[Adapter] = set()

    def load(self, rows: Iterable[SamplingParams]) -> None:
        """Loads the adapters that the rows need into slots, except those that cannot be read."""
        wanted = dict.fromkeys(each.adapter for each in rows if each.adapter is not None)
        self._unreadable &= wanted.keys()  # retried after a step without requests for it
        for adapter in wanted:
            if adapter in self._slots:
                self._slots[adapter] = self._slots.pop(adapter)
            elif adapter not in self._unreadable:
                self._read(adapter, wanted)

    def slot_of(self, sampling: SamplingParams | None) -> int:
        """Returns the slot of a row's adapter; NONE if it needs none, MISSING if the adapter is not loaded."""
        if sampling is None or sampling.adapter is None:
            return NONE
        return self._slots.get(sampling.adapter, MISSING)

    def _read(self, adapter: Adapter, wanted: dict[Adapter, Any]) -> None:
        """Loads an adapter. If that fails, the rows that need it sample nothing and end as errors; other rows are not
        affected."""
        try:
            weights = read_adapter(adapter, self.model, self.max_rank)
        except CheckpointError as error:
            self._unreadable.add(adapter)
            log.error("requests to %s fail here: %s", adapter.name, error)
            return
        slot = self._room(wanted)
        for each in self.programs:
            each.put(slot, weights)
        self._slots[adapter] = slot

    def _room(self, wanted: dict[Adapter, Any]) -> int:
        if self._free:
            return self._free.pop(0)
        oldest = next((each for each in self._slots if each not in wanted), None)
        assert oldest is not None, f"a step asks for {len(wanted)} adapters and there are {len(self._slots)} slots"
        return self._slots.pop(oldest)
