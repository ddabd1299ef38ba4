"""What `jdisagg.aot` says of a compiled program's time: its floor, what crosses the links and how much of that its
schedule hides behind other work, and what it may be expected to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from jdisagg.core.collectives import Collective, Sent
from jdisagg.core.mesh_spec import WorkerMesh
from jdisagg.core.roofline import Shard, Work, ring_tick
from jdisagg.core.schedule import Waited, waited
from jdisagg.core.stages import ring_cut
from jdisagg.core.targets import Target
from jdisagg.core.torus import Joined, joined
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.engine.compile_check import Checked
from jdisagg.engine.ring_declarations import ticks
from jdisagg.model.weight_bytes import number_bytes
from jdisagg.parallel.topology import devices_of
from jdisagg.serve.deployment import Deployment
from jdisagg.sim.expected import Expected, expected, multiplying, sending, start_s
from jdisagg.sim.hardware import Hardware, hardware


@dataclass(frozen=True)
class StepTimes:
    """Of a deployment's programs on a target."""

    deployment: Deployment
    target: Target
    context_tokens: int  # that a sequence holds in the floors of decode steps

    @cached_property
    def _chip(self) -> Hardware:
        return hardware(self.target.chip.name)

    def shard(self, place: WorkerMesh, layers: range) -> Shard:
        kept = self.deployment
        held = kept.model, layers, place.tp
        return Shard(*held, number_bytes(*held, kept.dtype, kept.weights), kept.kv.row_bytes / kept.kv.head_dim)

    def work(self, each: Checked) -> Work | None:
        """Of one device; None for programs whose floor says nothing."""
        place, config = self.deployment.place(each.worker), self._config(each.worker)
        if each.declared.kind.startswith("ring"):
            return self._ring_work(each, place, config)
        if each.declared.kind not in ("decode", "prefill", "head"):
            return None
        shard = self.shard(place, self.deployment.layers_of(place)[each.declared.stage])
        if each.declared.kind == "decode":
            width = each.declared.size * config.page_size
            return shard.decode(config.stage_slots, min(self.context_tokens, width))
        if each.declared.kind == "prefill":
            return shard.prefill(each.declared.size)
        return shard.head(config.max_chunk_seqs)

    def _ring_work(self, each: Checked, place: WorkerMesh, config: WorkerConfig) -> Work:
        """Of a whole dispatch."""
        numbers = ring_cut(self.deployment.model, place.pp).numbers
        shards = [self.shard(place, range(number, number + 1)) for number in numbers]
        context = min(self.context_tokens, each.declared.size * config.page_size)
        return ring_tick(shards, place.pp, config.num_slots // place.pp, context).times(ticks(config))

    def _config(self, worker: str) -> WorkerConfig:
        return next(config for config in self.deployment.workers if config.worker == worker)

    def sent(self, each: Checked) -> Sent:
        """Bytes that the busiest of its devices sends in one step."""
        return each.facts.sent(each.declared, self._hosts(each))

    def links_s(self, each: Checked) -> float:
        """Least seconds of its collectives, on the links within a host or slice and those between hosts at once."""
        hosts = self._hosts(each)

        def least_s(one: Collective) -> float:
            sent, inside = one.sent(hosts), self._chip.link_bytes_per_s * self._joined(each, one).links
            turns = prod(each.declared.loops[: one.depth])
            return turns * max(sent.inside / inside, sent.between / self._chip.nic_bytes_per_s)

        return sum(map(least_s, each.facts.across))

    def waited(self, each: Checked) -> Waited:
        """Seconds of its collectives, and how many of them the compiled schedule leaves exposed."""
        hosts, weights = self._hosts(each), self.deployment.weight_dtype

        def collective_s(one: Collective) -> float:
            between = self._joined(each, one)
            return start_s(self._chip, between) + sending(self._chip, one.sent(hosts), between)

        def work_s(work: Work) -> float:
            return multiplying(work, self._chip, weights)

        return waited(each.facts.schedule, work_s, collective_s, each.declared.loops)

    def expected(self, each: Checked) -> Expected | None:
        """Of one device, by the collectives of the program that was compiled; None where nothing is known of it."""
        work = self.work(each)
        if work is None or each.facts.why:
            return None
        return expected(work, self._chip, self.deployment.weight_dtype, self.waited(each).exposed_s)

    def _hosts(self, each: Checked) -> list[int]:
        return [self.target.host_of(self._numbers[device]) for device in each.declared.submesh.devices]

    def _joined(self, each: Checked, one: Collective) -> Joined:
        """What the first of its groups has; the others stand like it."""
        devices: Sequence[Any] = each.declared.submesh.devices
        if self.target.chip.gpu is not None:
            return Joined()
        group = one.groups[0] if one.groups else range(len(devices))
        return joined(self.target, [tuple(devices[place].coords) for place in group])

    @cached_property
    def _numbers(self) -> dict[Any, int]:
        return {device: index for index, device in enumerate(devices_of(self.target))}
