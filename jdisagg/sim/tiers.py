"""Tiers below HBM in virtual time: pages move at a tier's bandwidth, and the shared pool has a limited capacity.

A worker's own bookkeeping has the contents of its DRAM and disk. A worker runs one move after the other to each
tier, and one after the other from it, as the serving reader threads do. Workers do not slow each other's tiers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jdisagg.core.errors import ConfigError
from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.core.request import Attempt, WorkerId
from jdisagg.core.tiers import PageMove, PagesMoved, Tier
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.policy.cache.prefix_cache import PageHash, unpacked
from jdisagg.sim.hardware import ChipSpec

BELOW = (Tier.DRAM, Tier.DISK, Tier.POOL, Tier.PEER)  # the last one is another worker, over the network
LATENCY_S = {Tier.DRAM: 30e-6, Tier.DISK: 200e-6, Tier.POOL: 1e-3, Tier.PEER: 1e-3}


@dataclass(frozen=True, slots=True)
class TierRate:
    """The speed of one worker's transfers to and from a tier; `latency_s` is added for each move."""

    bytes_per_s: float
    latency_s: float


Speeds = Mapping[Tier, TierRate]


@dataclass(frozen=True, slots=True)
class TierSpec:
    """The tiers below HBM: their speeds for each worker, and the capacity of the shared pool."""

    speeds: Mapping[WorkerId, Speeds]
    pool_tokens: int = 0  # 0: no shared pool


@dataclass(slots=True)
class MoveStats:
    """Totals of the pages moved from one tier to another, over all workers."""

    pages: int = 0
    missed: int = 0  # requested, but not there
    tokens: int = 0
    num_bytes: float = 0.0
    seconds: float = 0.0  # from request to end, summed over moves
    moves: int = 0


@dataclass(slots=True)
class SharedPool:
    """Hashes of the pages in the shared pool; the least recently used is evicted if the pool is full."""

    room: int
    held: OrderedDict[PageHash, float] = field(default_factory=OrderedDict[PageHash, float])  # hash -> stored at

    def put(self, names: Iterable[PageHash], at_s: float) -> None:
        for name in names:
            self.held.setdefault(name, at_s)
            self.held.move_to_end(name)
        while len(self.held) > self.room:
            self.held.popitem(last=False)

    def get(self, name: PageHash, now_s: float) -> bool:
        if self.held.get(name, now_s + 1.0) > now_s:
            return False
        self.held.move_to_end(name)
        return True


class SimulatedTiers:
    """Runs page moves: computes when each ends and which pages arrive."""

    def __init__(self, spec: TierSpec, workers: Sequence[WorkerConfig], token_bytes: Mapping[WorkerId, float]) -> None:
        """Sets up the tiers; `token_bytes` are the bytes of a token's KV, by worker."""
        (self.page_size,) = {each.page_size for each in workers}  # the pages of a shared pool have one size
        self.spec = spec
        self.page_bytes = {worker: self.page_size * each for worker, each in token_bytes.items()}
        self.pool = SharedPool(spec.pool_tokens // self.page_size)
        self.moved: dict[tuple[Tier, Tier], MoveStats] = {}
        self._coming: dict[tuple[WorkerId, Attempt], PageMove] = {}  # requested from peers, not sent yet
        self._free_s: dict[tuple[WorkerId, Tier, bool], float] = {}  # when each queue is free: worker, tier, is_down

    def begin(self, worker: WorkerId, move: PageMove, now_s: float, ready_s: float) -> tuple[float, PagesMoved]:
        """Starts a move; returns its end and result. `ready_s` is the time from which the worker's devices can give
        pages of HBM, which are packed in program order."""
        names, is_down = unpacked(move.names), move.destination is not Tier.HBM
        queue = worker, (move.destination if is_down else move.source), is_down
        good = tuple(self.pool.get(name, now_s) for name in names) if move.source is Tier.POOL else (True,) * len(names)
        num_bytes, speed = sum(good) * self.page_bytes[worker], self._speed(worker, move, queue[1])
        begins_s = max(self._free_s.get(queue, 0.0), ready_s if move.source is Tier.HBM else now_s)
        done_s = self._free_s[queue] = begins_s + speed.latency_s + num_bytes / speed.bytes_per_s
        if move.destination is Tier.POOL:
            self.pool.put(names, done_s)
        self._count(move, good, num_bytes, done_s - now_s)
        return done_s, PagesMoved(move, good, done_s - now_s, round(num_bytes))

    def _speed(self, worker: WorkerId, move: PageMove, tier: Tier) -> TierRate:
        """Returns the speed to `tier`; pages sent from a tier below HBM are limited by that tier as well."""
        speeds = self.spec.speeds[worker]
        return min((speeds[each] for each in (tier, move.source) if each in speeds), key=lambda each: each.bytes_per_s)

    def expect(self, worker: WorkerId, move: PageMove) -> None:
        """Records a request for pages of a peer."""
        self._coming[worker, move.owner] = move

    def forget(self, worker: WorkerId, move: PageMove) -> None:
        self._coming.pop((worker, move.owner), None)

    def lent(self, lender: WorkerId, event: PagesMoved) -> PagesMoved | None:
        """Returns the requester's event when a peer's pages arrive; None if the request is gone."""
        move = event.move
        request = None if move.asked is None else self._coming.pop((move.peer, move.asked), None)
        if request is None or request.peer != lender:
            return None
        good = tuple(at < sum(event.good) for at in range(len(request.destination_pages)))
        self._count(request, good, event.num_bytes, event.seconds)
        return PagesMoved(request, good, event.seconds, event.num_bytes)

    def _count(self, move: PageMove, good: tuple[bool, ...], num_bytes: float, took_s: float) -> None:
        moved = self.moved.setdefault((move.source, move.destination), MoveStats())
        moved.pages += sum(good)
        moved.missed += len(good) - sum(good)
        moved.tokens += sum(good) * self.page_size
        moved.num_bytes += num_bytes
        moved.seconds += took_s
        moved.moves += 1


def tier_speeds(
    mesh: MeshSpec, devices: Mapping[Role, ChipSpec], given: Mapping[Tier, float]
) -> dict[WorkerId, Speeds]:
    """Returns the speeds of each worker: its devices' shares of their host, added up. `given` are the bytes per second
    per worker that are set explicitly."""

    def rate(chip: ChipSpec, count: int, tier: Tier) -> float:
        per_device = {Tier.DRAM: chip.host_bytes_per_s, Tier.DISK: chip.disk_bytes_per_s}
        return given.get(tier, count * per_device.get(tier, chip.nic_bytes_per_s))

    return {
        place.worker: {
            tier: TierRate(rate(devices[place.role], place.pp * place.tp, tier), LATENCY_S[tier]) for tier in BELOW
        }
        for place in mesh.workers()
    }


def rates_said(texts: Iterable[str]) -> dict[Tier, float]:
    """Parses bytes per second from dram:25,disk:3 (GB/s). Raises ConfigError."""
    rates: dict[Tier, float] = {}
    for text in texts:
        name, _, number = text.partition(":")
        try:
            tier, rate = Tier(name), float(number)
        except ValueError:
            tier, rate = Tier.HBM, 0.0
        if tier not in BELOW or rate <= 0:
            raise ConfigError(f"--tier_gb_per_s: {text!r} is no TIER:RATE of {', '.join(BELOW)} and a rate above 0")
        rates[tier] = rate * 1e9
    return rates
