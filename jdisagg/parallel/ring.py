"""The mesh of a ring: axes ("pp", "tp"), on which every program runs on all devices at once.

Stage s stands on the devices of row s, which are a submesh of their own as well: what is done to one stage's pages
alone runs there, and arrays change between the two views without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jdisagg.parallel.compiler_flags import options_for
from jdisagg.parallel.submesh import AXIS, WHOLE, Device, Program, Submesh

RING = "pp"
BOTH = (RING, AXIS)


class RingMesh:
    """`pp` stages of `tp` shards, devices stage-major; it may span processes as a `Submesh` does."""

    def __init__(self, devices: Sequence[Device], pp: int) -> None:
        self.devices, self.pp, self.tp = tuple(devices), pp, len(devices) // pp
        assert self.pp * self.tp == len(devices) and pp > 1, (pp, devices)
        self.mesh = Mesh(np.array(devices).reshape(pp, self.tp), BOTH, axis_types=(AxisType.Auto,) * 2)
        self.stages = [Submesh(devices[stage * self.tp : (stage + 1) * self.tp]) for stage in range(pp)]
        self.whole = self.sharding(WHOLE)

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    @cached_property
    def local_devices(self) -> tuple[Device, ...]:
        """Those of this process, in order."""
        return tuple(device for stage in self.stages for device in stage.local_devices)

    @property
    def reader(self) -> Device:
        """See `Submesh.reader`."""
        return next(iter(self.local_devices), self.devices[0])

    @property
    def axis(self) -> str | None:
        """What the shards of one stage sum over; None where it has one."""
        return AXIS if self.tp > 1 else None

    def put(self, arrays: Any) -> Any:
        """Host arrays (a pytree), the same in all processes, whole to every device."""
        return jax.tree.map(self._put_here, arrays)

    def _put_here(self, array: Any) -> jax.Array:
        copies = jax.device_put([array] * len(self.local_devices), list(self.local_devices))
        return jax.make_array_from_single_device_arrays(array.shape, self.whole, copies)

    def row_major(self, spec: PartitionSpec, rank: int) -> Format:
        """See `Submesh.row_major`."""
        return Format(Layout(tuple(range(rank))), self.sharding(spec))

    def program(
        self,
        function: Callable[..., Any],
        in_specs: Any,
        out_specs: Any,
        donate: tuple[int, ...] = (),
        out_formats: Any = None,
        *,
        as_stored: bool = False,
    ) -> Program:
        """`function` of one device as a program of all. as_stored: as of `Submesh.program`."""
        mapped = jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        options = options_for(self.reader, as_stored=as_stored, devices=len(self.devices))
        return Program(mapped, donate, out_formats, self.devices[0].platform, paced=True, options=options)

    # ------------------------------------------------------------ a stage's view of the ring's arrays, and back

    def shards_of(self, stage: int) -> list[int]:
        """The places among all devices of this process's devices of the stage."""
        return [self.devices.index(device) for device in self.stages[stage].local_devices]

    def joined(self, shards: Sequence[jax.Array], shape: tuple[int, ...], spec: PartitionSpec) -> jax.Array:
        """The array of the whole ring from this process's shards, in order."""
        return jax.make_array_from_single_device_arrays(shape, self.sharding(spec), list(shards))
