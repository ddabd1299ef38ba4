"""Tiers below HBM beside plain copies of the same bytes: `python -m benchmarks.tiers --output=FILE.json`.

Each store and its bare counterpart take turns in every round, so that a noisy minute hits both: DRAM beside one copy in
memory, disk beside a loop of `pwritev` and `preadv` on a file of the same size (both by way of the page cache), Redis
beside bare pipelines of the same values to the same server. What stores do more: digests, names, an index, threads.

With --model it asks for long prompts, too: the first token where the prompt's KV is computed, and where it comes back
from each tier, in the same process, turn by turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import redis

import jdisagg
from benchmarks import machine
from jdisagg.kv.tiers.pool.open import open_pool
from jdisagg.kv.tiers.stores import DiskStore, DramStore, PageStore
from tests.kv.tiers.valkey import Valkey

AIMS = {"dram": 0.6, "disk": 0.6, "redis": 0.7}  # of the bare counterpart's GB/s
TTFT_AIMS = {"dram": 0.25, "disk": 0.35, "pool": 0.5}  # of computing
FINGERPRINT = "f" * 32
TIMEOUT_S = 60.0
FIRST = jdisagg.SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


@dataclass
class Row:
    """One store and direction; GB/s of 1e9 bytes. Shares are of the bare counterpart's: the median over the rounds, and
    that of the best times of all, which noise disturbs least."""

    store: str
    way: str  # "put" or "get"
    gb_per_s: float  # medians
    bare_gb_per_s: float
    share: float
    best_share: float
    aim: float


@dataclass
class TtftRow:
    """Medians, of the prompts of one run."""

    tier: str
    prompt_tokens: int
    cached_tokens: float
    computed_s: float
    fetched_s: float
    share: float
    aim: float


Act = Callable[[int], None]  # of round n
Pair = tuple[Act, Act]  # the store's, and its bare counterpart's


class Load:
    """Records, and a place to read them into."""

    def __init__(self, count: int, record_bytes: int) -> None:
        self.records = np.random.default_rng(0).integers(0, 256, (count, record_bytes), np.uint8)
        self.read = np.ones_like(self.records)
        self.pages = tuple(range(count))

    def names(self, round_number: int) -> list[bytes]:
        return [round_number.to_bytes(8, "little") + page.to_bytes(8, "little") for page in self.pages]

    def put(self, store: PageStore) -> Act:
        return lambda n: _whole(store.put(self.pages, self.names(n), self.records))

    def get(self, store: PageStore) -> Act:
        return lambda n: _whole(store.get(self.pages, self.names(n), self.read))

    def check(self) -> None:
        assert (self.read == self.records).all(), "what came is not what was put"


def _whole(good: Sequence[bool]) -> None:
    assert all(good), "a page was not taken, or did not come"


def dram(load: Load) -> dict[str, Pair]:
    store, copy = DramStore(len(load.pages), load.records.shape[1]), np.ones_like(load.records)
    return {
        "put": (load.put(store), lambda n: np.copyto(copy, load.records)),
        "get": (load.get(store), lambda n: np.copyto(load.read, copy)),
    }


def disk(load: Load, folder: Path) -> dict[str, Pair]:
    size = load.records.shape[1]
    store = DiskStore(folder / "store.kv", len(load.pages), size, FINGERPRINT)
    file = os.open(folder / "bare", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(file, 0, load.records.nbytes)

    def bare(call: Callable[..., int], into: np.ndarray) -> None:
        for page, record in enumerate(into):
            assert call(file, [record.data], page * size) == size

    return {
        "put": (load.put(store), lambda n: bare(os.pwritev, load.records)),
        "get": (load.get(store), lambda n: bare(os.preadv, load.read)),
    }


def pooled(load: Load, url: str) -> dict[str, Pair]:
    client, store = redis.Redis.from_url(url), open_pool(url, FINGERPRINT, timeout_s=TIMEOUT_S)
    batch = max(1, (8 << 20) // load.records.shape[1])

    def bare(n: int, add: Callable[[Any, bytes, int], Any]) -> list[Any]:
        names, replies = load.names(n), list[Any]()
        for start in range(0, len(names), batch):
            pipeline = client.pipeline(transaction=False)
            for at in range(start, min(start + batch, len(names))):
                add(pipeline, b"bare" + names[at], at)
            replies += pipeline.execute()
        return replies

    def bare_put(n: int) -> None:
        bare(n, lambda pipeline, name, at: pipeline.set(name, load.records[at].tobytes()))

    def bare_get(n: int) -> None:
        for at, value in enumerate(bare(n, lambda pipeline, name, at: pipeline.get(name))):
            load.read[at] = np.frombuffer(value, np.uint8)

    return {"put": (load.put(store), bare_put), "get": (load.get(store), bare_get)}


def rows_of(name: str, pairs: dict[str, Pair], load: Load, rounds: int) -> list[Row]:
    """Each round puts, then gets; the first is not counted."""
    took = {way: ([0.0] * rounds, [0.0] * rounds) for way in pairs}
    for number in range(-1, rounds):
        for way, pair in pairs.items():
            for index, act in enumerate(pair):
                began_s = time.perf_counter()
                act(number + 1)
                if number >= 0:
                    took[way][index][number] = time.perf_counter() - began_s
        load.check()
    return [_row(name, way, *took[way], load.records.nbytes) for way in pairs]


def _row(name: str, way: str, ours_s: list[float], bare_s: list[float], nbytes: int) -> Row:
    ours, bare = (nbytes / statistics.median(each) / 1e9 for each in (ours_s, bare_s))
    share = statistics.median(other / own for own, other in zip(ours_s, bare_s, strict=True))
    best = min(bare_s) / min(ours_s)
    return Row(name, way, round(ours, 3), round(bare, 3), round(share, 3), round(best, 3), AIMS[name])


def stores(count: int, record_bytes: int, rounds: int) -> Iterator[Row]:
    load = Load(count, record_bytes)
    yield from rows_of("dram", dram(load), load, rounds)
    with TemporaryDirectory() as folder:
        yield from rows_of("disk", disk(load, Path(folder)), load, rounds)
    room_mb = 256 + 3 * (rounds + 1) * load.records.nbytes // 2**20  # each round has names of its own
    with Valkey(memory=f"{room_mb}mb") as server:
        yield from rows_of("redis", pooled(load, server.url), load, rounds)


# ------------------------------------------------------------------ first tokens


@contextmanager
def tier_settings(tier: str, tokens: int) -> Iterator[dict[str, Any]]:
    match tier:
        case "dram":
            yield {"dram_tokens": tokens}
        case "disk":
            with TemporaryDirectory() as folder:
                yield {"disk_path": folder, "disk_tokens": tokens}
        case _:
            with Valkey(memory="4gb") as server:
                yield {"pool": server.url}


def first_tokens(model: str, tier: str, prompt_tokens: int, prompts: int) -> TtftRow:
    """HBM holds one prompt and a half. Each is asked for in turn, until what is read back is in its tier: twice."""
    rng, tokens = np.random.default_rng(1), prompt_tokens + 32
    asked = [rng.integers(10, 1000, prompt_tokens).tolist() for _ in range(prompts)]
    sizes = {"max_model_len": tokens, "max_num_seqs": 1, "kv_tokens": tokens * 3 // 2}
    with (
        tier_settings(tier, 2 * prompts * tokens) as below,
        jdisagg.LLM(model=model, mesh="colocated:1xtp1", **sizes, **below) as llm,
    ):
        llm.generate(rng.integers(10, 1000, prompt_tokens).tolist(), FIRST)
        rounds = [[_timed(llm, each) for each in asked] for _ in range(4)]
    computed = [each for found in rounds for each in found if each[1] == 0]
    fetched = [each for found in rounds for each in found if each[1] > prompt_tokens // 2]
    slow, quick = (statistics.median(each[0] for each in rows) if rows else 0.0 for rows in (computed, fetched))
    cached = statistics.median(each[1] for each in fetched) if fetched else 0
    share = round(quick / slow, 3) if fetched and computed else 0.0
    return TtftRow(tier, prompt_tokens, cached, round(slow, 4), round(quick, 4), share, TTFT_AIMS[tier])


def _timed(llm: jdisagg.LLM, prompt: list[int]) -> tuple[float, int]:
    began_s = time.perf_counter()
    cached = llm.generate(prompt, FIRST).cached_tokens
    return time.perf_counter() - began_s, cached


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="JSON file for the rows, the machine and the versions")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--records", type=int, default=64, help="in a batch")
    parser.add_argument("--record_kb", type=int, default=1024, help="of a record: 64 tokens of a 1B model have 2 MB")
    parser.add_argument("--model", default="", help="whose first tokens are timed as well")
    parser.add_argument("--prompt_tokens", type=int, default=1024)
    parser.add_argument("--prompts", type=int, default=3)
    options = parser.parse_args(argv)
    head, rows, firsts = machine.described(), list[Row](), list[TtftRow]()
    for row in stores(options.records, options.record_kb << 10, options.rounds):
        rows.append(row)
        told = f"{row.gb_per_s:7.2f} GB/s, bare {row.bare_gb_per_s:7.2f}: {row.share:.0%}, best {row.best_share:.0%}"
        print(f"{row.store:6} {row.way} {told} (aim {row.aim:.0%})", flush=True)
    for tier in TTFT_AIMS if options.model else ():
        firsts.append(first := first_tokens(options.model, tier, options.prompt_tokens, options.prompts))
        print(f"{tier:6} first token {first.fetched_s:.3f} s, computed {first.computed_s:.3f} s: {first.share:.0%}")
    if options.output is not None:
        record = head | {"rows": [asdict(row) for row in rows], "first_tokens": [asdict(each) for each in firsts]}
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
