"""A submesh is the devices of one stage under the single axis "tp"; this module places arrays and programs on it.

On one device arrays and programs are plain single-device ones, never a mesh of one: on the CPU backend single-device
programs overlap with everything, multi-device ones do not overlap with each other.

A submesh may span the processes of one JAX job, which then run the same programs in the same order. Each process writes
and reads only the shards on its own devices. `jax.device_put` of a host array to shards of other processes would first
broadcast it to check that all agree, which takes milliseconds.
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

Device = Any  # a jax.Device, which type checkers do not accept as a type
Signature = tuple[tuple[tuple[int, ...], str], ...]  # shape and dtype of each leaf
AXIS = "tp"
WHOLE = PartitionSpec()


class StageMesh:
    """The devices of one stage, in shard order."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(devices)
        self.mesh = Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
        self.whole = self.sharding(WHOLE)

    @property
    def tp(self) -> int:
        return len(self.devices)

    @property
    def axis(self) -> str | None:
        """The axis that programs of this submesh reduce over; None on one device."""
        return AXIS if self.tp > 1 else None

    def sharding(self, spec: PartitionSpec) -> Sharding:
        return SingleDeviceSharding(self.devices[0]) if self.tp == 1 else NamedSharding(self.mesh, spec)

    @property
    def _target(self) -> Any:
        """The target of `jax.device_put` for replicated arrays. On one device it is the device itself, which takes the
        host less than half as long as the equivalent sharding."""
        return self.devices[0] if self.tp == 1 else self.whole

    @cached_property
    def local_devices(self) -> tuple[Device, ...]:
        """The devices of this process, in shard order."""
        return tuple(each for each in self.devices if each.process_index == jax.process_index())

    @property
    def reader(self) -> Device:
        """The device from which this process reads replicated arrays; the submesh's first device if it has none."""
        return next(iter(self.local_devices), self.devices[0])

    @property
    def spans_processes(self) -> bool:
        return len(self.local_devices) < len(self.devices)

    def put(self, arrays: Any) -> Any:
        """Copies host arrays (a pytree), equal in all processes, to every shard. An aligned numpy buffer may be
        adopted, so the caller must never write to it again."""
        return jax.tree.map(self._put_here, arrays) if self.spans_processes else jax.device_put(arrays, self._target)

    def _put_here(self, array: Any) -> jax.Array:
        return self._whole_of(array, [array] * len(self.local_devices))

    def _whole_of(self, like: Any, copies: Sequence[Any]) -> jax.Array:
        """Returns one replicated array from a copy for each device of this process."""
        buffers = jax.device_put(list(copies), list(self.local_devices))
        return jax.make_array_from_single_device_arrays(like.shape, self.whole, buffers)

    def transfer(self, array: jax.Array) -> jax.Array:
        """Copies a replicated array of another submesh of the same size to this one; returns at once."""
        if array.sharding == self.whole:
            return array
        if self.spans_processes:
            return self._whole_of(array, [shard.data for shard in array.addressable_shards])
        return jax.device_put(array, self._target)

    def spread(self, array: jax.Array) -> jax.Array:
        """Copies an array on one device of this process to every shard here; returns at once."""
        if self.tp == 1:
            return array if array.devices() == {self.devices[0]} else jax.device_put(array, self.devices[0])
        return self._whole_of(array, [array] * len(self.local_devices))

    def first_copy(self, array: jax.Array) -> jax.Array:
        """Returns the copy of a replicated array on `reader`."""
        return array if self.tp == 1 else array.addressable_data(0)

    def join(self, shards: Sequence[jax.Array], spec: PartitionSpec, axis: int) -> jax.Array:
        """Returns one array, cut along `axis`, from this process's shards, each on its device already."""
        if self.tp == 1:
            return shards[0]
        shape = list(shards[0].shape)
        shape[axis] *= self.tp
        return jax.make_array_from_single_device_arrays(tuple(shape), self.sharding(spec), list(shards))

    def row_major(self, spec: PartitionSpec, rank: int) -> Format:
        """Returns `sharding` with a row-major memory layout on every platform. A TPU by default puts another dimension
        last if the last one is shorter than 128 lanes."""
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
        """Returns `function` of one shard as a program of the whole submesh. The specs are those of `jax.shard_map`.

        `out_formats`: a Format or None per result, to fix its layout. `as_stored`: bf16 and fp8 are moved and converted
        but not computed with. `beside`: the program overlaps small all-reduces with products.
        """
        if self.tp > 1:
            function = jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        platform = self.devices[0].platform
        options = options_for(self.reader, as_stored=as_stored, devices=self.tp, beside=beside)
        return Program(function, donate, out_formats, platform, paced=self.tp > 1, options=options)


def placed(array: np.ndarray, sharding: Sharding) -> jax.Array:
    """Copies a host array, equal in all processes, to this process's devices of a sharding."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


def shards_here(array: jax.Array) -> dict[int, jax.Array]:
    """Returns the shards on devices of this process, by shard index."""
    if len(array.sharding.device_set) == 1:
        return {0: array.addressable_data(0)}
    if array.is_fully_addressable:
        return {index: array.addressable_data(index) for index in range(len(array.sharding.device_set))}
    assert isinstance(array.sharding, NamedSharding) and array.sharding.mesh.devices is not None, array.sharding
    index_of = {device: index for index, device in enumerate(array.sharding.mesh.devices.flat)}
    return {index_of[shard.device]: shard.data for shard in array.addressable_shards}


def signature_of(arguments: Any) -> Signature:
    """Returns the shapes and dtypes for which a program is traced anew."""
    return tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in jax.tree.leaves(arguments))


class Program:
    """A jitted pure function that records its traced signatures. Paced programs return a non-donated array last."""

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
        """Wraps `function`. `platform` selects the kernels to trace; `options` are the compiler's
        (`compiler_flags.py`)."""

        # A function of its own, because jit has one cache per function and the counts here are per program.
        @wraps(function)
        def own(*arguments: Any) -> Any:
            self.traced.add(signature_of(arguments))  # runs only while tracing
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
        """Returns the program lowered for arrays or abstract arguments, ready to compile; nothing runs."""
        return self._jit.lower(*arguments)

    @property
    def num_compiled(self) -> int:
        """Number of signatures and placements for which this program was compiled."""
        return self._jit._cache_size()


# The mesh of a ring: axes ("pp", "tp"); its programs run on all devices at once.
#
# The devices of row s form stage s and also a submesh. Programs on one stage's pages run on that submesh, and arrays
# change between the two views without a copy.

RING = "pp"
BOTH = (RING, AXIS)


class RingMesh:
    """A mesh of `pp` stages of `tp` shards, devices stage-major; it may span processes like a `StageMesh`."""

    def __init__(self, devices: Sequence[Device], pp: int) -> None:
        self.devices, self.pp, self.tp = tuple(devices), pp, len(devices) // pp
        assert self.pp * self.tp == len(devices) and pp > 1, (pp, devices)
        self.mesh = Mesh(np.array(devices).reshape(pp, self.tp), BOTH, axis_types=(AxisType.Auto,) * 2)
        self.stages = [StageMesh(devices[stage * self.tp : (stage + 1) * self.tp]) for stage in range(pp)]
        self.whole = self.sharding(WHOLE)

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    @cached_property
    def local_devices(self) -> tuple[Device, ...]:
        """The devices of this process, in order."""
        return tuple(device for stage in self.stages for device in stage.local_devices)

    @property
    def reader(self) -> Device:
        """The device from which this process reads; see `Submesh.reader`."""
        return next(iter(self.local_devices), self.devices[0])

    @property
    def axis(self) -> str | None:
        """The axis that the shards of one stage reduce over; None with one shard."""
        return AXIS if self.tp > 1 else None

    def put(self, arrays: Any) -> Any:
        """Copies host arrays (a pytree), equal in all processes, whole to every device."""
        return jax.tree.map(self._put_here, arrays)

    def _put_here(self, array: Any) -> jax.Array:
        copies = jax.device_put([array] * len(self.local_devices), list(self.local_devices))
        return jax.make_array_from_single_device_arrays(array.shape, self.whole, copies)

    def row_major(self, spec: PartitionSpec, rank: int) -> Format:
        """Returns a row-major format; see `Submesh.row_major`."""
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
        """Returns `function` of one device as a program of the whole ring; see `Submesh.program`."""
        mapped = jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        options = options_for(self.reader, as_stored=as_stored, devices=len(self.devices))
        return Program(mapped, donate, out_formats, self.devices[0].platform, paced=True, options=options)

    # Conversion between a stage's arrays and the ring's.

    def shards_of(self, stage: int) -> list[int]:
        """Returns the indices in the ring of this process's devices of the stage."""
        return [self.devices.index(device) for device in self.stages[stage].local_devices]

    def joined(self, shards: Sequence[jax.Array], shape: tuple[int, ...], spec: PartitionSpec) -> jax.Array:
        """Returns the array of the whole ring from this process's shards, in order."""
        return jax.make_array_from_single_device_arrays(shape, self.sharding(spec), list(shards))
