"""Tiers below HBM in virtual time: pages move at what a tier's bandwidth says, and a pool has room for so many.

What a worker's own DRAM and disk hold is in its books, which it alone writes. A worker does one move after the other to
each tier, and one after the other from it, as live readers do; a tier of one worker takes nothing from another's.
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
from jdisagg.sim.hardware import Hardware

BELOW = (Tier.DRAM, Tier.DISK, Tier.POOL, Tier.PEER)  # the last is another worker, over the network
LATENCY_S = {Tier.DRAM: 30e-6, Tier.DISK: 200e-6, Tier.POOL: 1e-3, Tier.PEER: 1e-3}


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """Of one worker's way to a tier, each direction; `latency_s` is of a move, besides its bytes."""

    bytes_per_s: float
    latency_s: float


Speeds = Mapping[Tier, TierSpeed]


@dataclass(frozen=True, slots=True)
class TierSpec:
    """What lies below HBM: how quick it is for each worker, and what the pool has room for."""

    speeds: Mapping[WorkerId, Speeds]
    pool_tokens: int = 0  # 0: there is none


@dataclass(slots=True)
class Moved:
    """Pages that came from one tier to another, of all workers together."""

    pages: int = 0
    missed: int = 0  # asked for, and not there
    tokens: int = 0
    num_bytes: float = 0.0
    seconds: float = 0.0  # from the wish to the end, summed over moves
    moves: int = 0


@dataclass(slots=True)
class SharedPool:
    """Names of the pages that all workers share; the least recently used goes where there is no more room."""

    room: int
    held: OrderedDict[PageHash, float] = field(default_factory=OrderedDict[PageHash, float])  # from when on

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
    """Carries out moves: says when each is over, and what of it arrives."""

    def __init__(self, spec: TierSpec, workers: Sequence[WorkerConfig], token_bytes: Mapping[WorkerId, float]) -> None:
        """token_bytes: of a token's KV, worker by worker."""
        (self.page_size,) = {each.page_size for each in workers}  # a pool's pages are of one size
        self.spec = spec
        self.page_bytes = {worker: self.page_size * each for worker, each in token_bytes.items()}
        self.pool = SharedPool(spec.pool_tokens // self.page_size)
        self.moved: dict[tuple[Tier, Tier], Moved] = {}
        self._coming: dict[tuple[WorkerId, Attempt], PageMove] = {}  # from peers, not sent yet
        self._free_s: dict[tuple[WorkerId, Tier, bool], float] = {}  # of each way: worker, tier, whether it is down

    def begin(self, worker: WorkerId, move: PageMove, now_s: float, ready_s: float) -> tuple[float, PagesMoved]:
        """ready_s: from when on the worker's devices give pages of HBM, which are packed in program order."""
        names, down = unpacked(move.names), move.destination is not Tier.HBM
        lane = worker, (move.destination if down else move.source), down
        good = tuple(self.pool.get(name, now_s) for name in names) if move.source is Tier.POOL else (True,) * len(names)
        num_bytes, speed = sum(good) * self.page_bytes[worker], self._speed(worker, move, lane[1])
        begins_s = max(self._free_s.get(lane, 0.0), ready_s if move.source is Tier.HBM else now_s)
        done_s = self._free_s[lane] = begins_s + speed.latency_s + num_bytes / speed.bytes_per_s
        if move.destination is Tier.POOL:
            self.pool.put(names, done_s)
        self._count(move, good, num_bytes, done_s - now_s)
        return done_s, PagesMoved(move, good, done_s - now_s, round(num_bytes))

    def _speed(self, worker: WorkerId, move: PageMove, tier: Tier) -> TierSpeed:
        """What is lent out of a tier below HBM is no quicker than that."""
        speeds = self.spec.speeds[worker]
        return min((speeds[each] for each in (tier, move.source) if each in speeds), key=lambda each: each.bytes_per_s)

    def expect(self, worker: WorkerId, move: PageMove) -> None:
        """Pages of a peer, who was asked for them."""
        self._coming[worker, move.owner] = move

    def forget(self, worker: WorkerId, move: PageMove) -> None:
        self._coming.pop((worker, move.owner), None)

    def lent(self, lender: WorkerId, event: PagesMoved) -> PagesMoved | None:
        """What who asked hears when these pages are there; None where nobody waits for them."""
        move = event.move
        wanted = None if move.asked is None else self._coming.pop((move.peer, move.asked), None)
        if wanted is None or wanted.peer != lender:
            return None
        good = tuple(at < sum(event.good) for at in range(len(wanted.destination_pages)))
        self._count(wanted, good, event.num_bytes, event.seconds)
        return PagesMoved(wanted, good, event.seconds, event.num_bytes)

    def _count(self, move: PageMove, good: tuple[bool, ...], num_bytes: float, took_s: float) -> None:
        moved = self.moved.setdefault((move.source, move.destination), Moved())
        moved.pages += sum(good)
        moved.missed += len(good) - sum(good)
        moved.tokens += sum(good) * self.page_size
        moved.num_bytes += num_bytes
        moved.seconds += took_s
        moved.moves += 1


def tier_speeds(
    mesh: MeshSpec, devices: Mapping[Role, Hardware], given: Mapping[Tier, float]
) -> dict[WorkerId, Speeds]:
    """Of each worker: its devices' shares of their host, together. given: bytes a second of a worker that are said."""

    def rate(chip: Hardware, count: int, tier: Tier) -> float:
        of_one = {Tier.DRAM: chip.host_bytes_per_s, Tier.DISK: chip.disk_bytes_per_s}
        return given.get(tier, count * of_one.get(tier, chip.nic_bytes_per_s))

    return {
        place.worker: {
            tier: TierSpeed(rate(devices[place.role], place.pp * place.tp, tier), LATENCY_S[tier]) for tier in BELOW
        }
        for place in mesh.workers()
    }


def rates_said(words: Iterable[str]) -> dict[Tier, float]:
    """Bytes a second, of dram:25,disk:3 (GB/s). Raises ConfigError."""
    said: dict[Tier, float] = {}
    for word in words:
        name, _, number = word.partition(":")
        try:
            tier, rate = Tier(name), float(number)
        except ValueError:
            tier, rate = Tier.HBM, 0.0
        if tier not in BELOW or rate <= 0:
            raise ConfigError(f"--tier_gb_per_s: {word!r} is no TIER:RATE of {', '.join(BELOW)} and a rate above 0")
        said[tier] = rate * 1e9
    return said
