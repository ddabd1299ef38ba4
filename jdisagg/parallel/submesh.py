"""A submesh: the devices of one stage under the single axis "tp", and how arrays and programs get there.

One device means plain single-device arrays and programs, never a mesh of one: on the CPU backend single-device
programs overlap with everything, multi-device ones with none of their kind.

A submesh may span the processes of one JAX world, all of which then run the same programs in the same order. Each puts
and reads the shards on its own devices alone: `jax.device_put` of a host's array to shards that are not all its own
first broadcasts it to all processes, to see that they agree, which takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, wraps
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jdisagg.parallel.compiler_flags import AS_STORED, Option, options_for
from jdisagg.parallel.pace import LAUNCHES
from pallas_kernels.platforms import moved_as_stored, traced_for

Device = Any  # a jax.Device, which is no type to type checkers
Signature = tuple[tuple[tuple[int, ...], str], ...]  # shape and dtype of each leaf
AXIS = "tp"
WHOLE = PartitionSpec()


class Submesh:
    """Devices of one stage, in shard order."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(devices)
        self.mesh = Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
        self.whole = self.sharding(WHOLE)

    @property
    def tp(self) -> int:
        return len(self.devices)

    @property
    def axis(self) -> str | None:
        """What programs of this submesh sum over; None on one device."""
        return AXIS if self.tp > 1 else None

    def sharding(self, spec: PartitionSpec) -> Sharding:
        return SingleDeviceSharding(self.devices[0]) if self.tp == 1 else NamedSharding(self.mesh, spec)

    @property
    def _target(self) -> Any:
        """Where `jax.device_put` brings what is whole on every shard; of one device it is the device itself, which
        takes the host less than half as long as the sharding that says the same."""
        return self.devices[0] if self.tp == 1 else self.whole

    @cached_property
    def local_devices(self) -> tuple[Device, ...]:
        """Those of this process, in shard order."""
        return tuple(each for each in self.devices if each.process_index == jax.process_index())

    @property
    def reader(self) -> Device:
        """Where this process reads what is whole on every shard; the first of all where it holds none."""
        return next(iter(self.local_devices), self.devices[0])

    @property
    def spans_processes(self) -> bool:
        return len(self.local_devices) < len(self.devices)

    def put(self, arrays: Any) -> Any:
        """Host arrays (a pytree), the same in all processes, to every shard. An aligned numpy buffer may be adopted:
        never write to it again."""
        return jax.tree.map(self._put_here, arrays) if self.spans_processes else jax.device_put(arrays, self._target)

    def _put_here(self, array: Any) -> jax.Array:
        return self._whole_of(array, [array] * len(self.local_devices))

    def _whole_of(self, like: Any, copies: Sequence[Any]) -> jax.Array:
        """One array that is whole on every shard, from a copy for each device of this process."""
        landed = jax.device_put(list(copies), list(self.local_devices))
        return jax.make_array_from_single_device_arrays(like.shape, self.whole, landed)

    def transfer(self, array: jax.Array) -> jax.Array:
        """Activations, whole on every shard of another submesh with as many shards, to this one; returns at once."""
        if array.sharding == self.whole:
            return array
        if self.spans_processes:
            return self._whole_of(array, [shard.data for shard in array.addressable_shards])
        return jax.device_put(array, self._target)

    def spread(self, array: jax.Array) -> jax.Array:
        """An array of one device of this process, anywhere, to every shard here; returns at once."""
        if self.tp == 1:
            return array if array.devices() == {self.devices[0]} else jax.device_put(array, self.devices[0])
        return self._whole_of(array, [array] * len(self.local_devices))

    def first_copy(self, array: jax.Array) -> jax.Array:
        """Of an array that is whole on every shard here, what lies on `reader`."""
        return array if self.tp == 1 else array.addressable_data(0)

    def join(self, shards: Sequence[jax.Array], spec: PartitionSpec, axis: int) -> jax.Array:
        """One array of this submesh from the shards of this process, each on its own device already, cut along
        `axis`."""
        if self.tp == 1:
            return shards[0]
        shape = list(shards[0].shape)
        shape[axis] *= self.tp
        return jax.make_array_from_single_device_arrays(tuple(shape), self.sharding(spec), list(shards))

    def row_major(self, spec: PartitionSpec, rank: int) -> Format:
        """As `sharding`, for arrays whose memory is to be laid out in the order of their dimensions on every platform.

        A TPU left to itself puts another dimension last where the last one is shorter than 128 lanes.
        """
        return Format(Layout(tuple(range(rank))), self.sharding(spec))

    def program(
        self,
        function: Callable[..., Any],
        in_specs: Any = None,
        out_specs: Any = None,
        donate: tuple[int, ...] = (),
        out_formats: Any = None,
        *,
        as_stored: bool = False,
        beside: bool = False,
    ) -> Program:
        """`function` of one shard as a program of the whole submesh. The specs are those of `jax.shard_map`.

        out_formats: a Format or None for each result, where their layout is not for the compiler to choose.
        as_stored: bf16 and fp8 are moved and converted here, and computed with nowhere. beside: small sums over the
        shards have products beside them here.
        """
        if self.tp > 1:
            function = jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        platform = self.devices[0].platform
        options = options_for(self.reader, as_stored=as_stored, devices=self.tp, beside=beside)
        return Program(function, donate, out_formats, platform, paced=self.tp > 1, options=options)


def placed(array: np.ndarray, sharding: Sharding) -> jax.Array:
    """A host array, the same in all processes, on the devices of this one."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


def shards_here(array: jax.Array) -> dict[int, jax.Array]:
    """The shards on devices of this process, by their place among all."""
    if len(array.sharding.device_set) == 1:
        return {0: array.addressable_data(0)}
    if array.is_fully_addressable:
        return {place: array.addressable_data(place) for place in range(len(array.sharding.device_set))}
    assert isinstance(array.sharding, NamedSharding) and array.sharding.mesh.devices is not None, array.sharding
    places = {device: place for place, device in enumerate(array.sharding.mesh.devices.flat)}
    return {places[shard.device]: shard.data for shard in array.addressable_shards}


def signature_of(arguments: Any) -> Signature:
    """What a program is traced anew for."""
    return tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in jax.tree.leaves(arguments))


class Program:
    """A jitted pure function that knows what it was compiled for. Paced ones return a non-donated array last."""

    def __init__(
        self,
        function: Callable[..., Any],
        donate: tuple[int, ...] = (),
        out_formats: Any = None,
        platform: str | None = None,
        *,
        paced: bool = False,
        options: dict[str, Option] | None = None,
    ) -> None:
        """platform: of the devices it is for, where it has kernels: those of other platforms are not traced then.
        options: the compiler's (`compiler_flags.py`)."""

        # Through a function of its own: jit keeps one cache a function, and counts here are this program's alone.
        @wraps(function)
        def own(*arguments: Any) -> Any:
            self.traced.add(signature_of(arguments))  # runs while tracing alone
            with traced_for(platform), moved_as_stored(options == AS_STORED):
                return function(*arguments)

        self.traced: set[Signature] = set()
        self._jit: Any = jax.jit(own, donate_argnums=donate, out_shardings=out_formats, compiler_options=options)
        self._paced = paced
        self.name = str(getattr(function, "__name__", function))

    def __call__(self, *arguments: Any) -> Any:
        results = self._jit(*arguments)
        if self._paced:
            LAUNCHES.launched(jax.tree.leaves(results)[-1], self.name, arguments)
        return results

    def lower(self, *arguments: Any) -> jax.stages.Lowered:
        """The program for arguments that may be shapes with a sharding, ready to compile; nothing runs."""
        return self._jit.lower(*arguments)

    @property
    def num_compiled(self) -> int:
        """Shapes and placements this function was compiled for."""
        return self._jit._cache_size()


# The mesh of a ring: axes ("pp", "tp"), on which every program runs on all devices at once.
#
# Stage s stands on the devices of row s, which are a submesh of their own as well: what is done to one stage's
# pages alone runs there, and arrays change between the two views without a copy.

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
