"""Mooncake's conversation trace on a simulated cluster whose workers keep KV below HBM: what is found again, and where.

LLaMA3-70B on nodes of eight A800s, priced as fitted to Mooncake's figure 14a (Qin et al., FAST 2025). Four questions:
how much one node finds by how much it keeps (figure 9), where pages are given up by price and, beside it, the least
recently used first; how first tokens come by four ways to route (figure 5), of which the last shares what all nodes
hold, by a pool or from each other; and what refusing early saves where time runs faster than the cluster can follow.

    python -m benchmarks.mooncake_tiers --data_dir=FOLDER --output=benchmarks/results/mooncake_tiers.json
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path

import numpy as np
from absl import flags
from rich.console import Console

from benchmarks import entry, report
from benchmarks.machine import described
from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.core.router_config import Routing
from jdisagg.core.tiers import Tier
from jdisagg.policy.cache.page_pool import TierPage, TierPool
from jdisagg.sim.cluster import PATIENT, Cluster
from jdisagg.sim.cluster_spec import cluster_spec, devices_of, longest, plain_settings, with_room, with_tiers
from jdisagg.sim.outcome import SLO, Outcome
from jdisagg.sim.shared import simulated
from jdisagg.sim.tiers import TierSpec, tier_speeds
from jdisagg.sim.traces import Trace, read_mooncake, spread_ticks
from tests.published.prefix_replay import mooncake_70b

FLAGS = flags.FlagValues()
flags.DEFINE_string("data_dir", "", "folder of the public traces; empty: the first 300 requests", flag_values=FLAGS)
flags.DEFINE_integer("requests", 0, "the trace's first so many; 0: all", 0, flag_values=FLAGS)
flags.DEFINE_list("parts", ["kept", "routed"], "which questions: kept, routed, refused", flag_values=FLAGS)
flags.DEFINE_list("kept", ["1", "3", "10", "50"], "million tokens that one node keeps", flag_values=FLAGS)
flags.DEFINE_list("nodes", ["6", "9"], "prefill nodes, and as many that decode", flag_values=FLAGS)
flags.DEFINE_list("hastes", ["1.5", "2"], "times as fast as recorded, where some are refused", flag_values=FLAGS)
flags.DEFINE_integer("routed", 3000, "requests that are routed in each way", 1, flag_values=FLAGS)
flags.DEFINE_integer("hasty", 2000, "requests that come faster than recorded", 1, flag_values=FLAGS)
flags.DEFINE_string("output", "", "JSON file", flag_values=FLAGS)

TRACE = "mooncake_fast25_conversation.jsonl.gz"
EXCERPT = Path("tests/fixtures/traces/mooncake_conversation_first_300.jsonl.gz")
FIGURE_9 = {1: 0.087, 3: 0.165, 10: 0.326, 50: 0.398}  # of blocks of 256 tokens; the trace has 512
FIGURE_5 = {"random": 19.65, "least loaded": 5.27, "cache-aware": 3.58, "global": 3.07}  # mean TTFT, s
LOW = 0.045  # how far under figure 9 counts as within its band
PAGE, PORT_BYTES_PER_S = 512, 87e9
ONE_PROMPT = 131_072  # tokens of HBM that keep nothing of note
NODE_HBM, NODE_DRAM = 1_000_000, 3_000_000  # tokens of one node; Mooncake's figure 5 keeps 3 million
ASKS = SLO(30.0, 0.1)  # as its section 5 does


class LeastRecent(TierPool):
    """What was used least recently is given up first, whatever it is worth; of one prompt its end before its beginning,
    whose pages come one by one from the first on."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self._turns = count(1)

    def price_of(self, kept: TierPage) -> float:
        return next(self._turns) - 2 * kept.depth


@dataclass(frozen=True, slots=True)
class Kept:
    """One node that keeps so much; shares of prompt tokens."""

    million_tokens: float
    by_price: float
    by_age: float
    published: float
    within: bool  # the band of `LOW`


@dataclass(frozen=True, slots=True)
class Routed:
    """One way to route, over so many prefill nodes. Shares are of prompt tokens, by where their KV came from."""

    nodes: int
    system: str
    ttft_mean_s: float
    ttft_p99_s: float
    found: float
    from_dram: float
    from_pool: float
    from_peers: float
    published_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    """Of all requests, with objectives of 30 s and 0.1 s."""

    haste: float
    early: bool
    met: float
    late: float
    refused: float
    goodput_rps: float


def conversation() -> Trace:
    path = Path(FLAGS.data_dir) / TRACE if FLAGS.data_dir else EXCERPT
    work = spread_ticks(read_mooncake(path))
    return work.rows(np.arange(FLAGS.requests or len(work)))


def cluster(
    mesh: str, work: Trace, routing: Routing, hbm: int, dram: int, pool: int = 0, *, peers: bool = False
) -> Cluster:
    spec, cost = MeshSpec.parse(mesh), mooncake_70b()
    sizes = plain_settings(longest(work), max_num_seqs=256, page_size=PAGE, prefix_caching="on")
    given = cluster_spec(spec, sizes, with_room(lambda _: (cost, 0), hbm), PORT_BYTES_PER_S)
    speeds = tier_speeds(spec, devices_of("a800"), {Tier.POOL: PORT_BYTES_PER_S, Tier.PEER: PORT_BYTES_PER_S})
    tiered = with_tiers(given, TierSpec(speeds, pool), dram, peer_fetch=peers)
    return simulated(tiered, router=replace(PATIENT, routing=routing))


def share(outcome: Outcome, source: Tier, tokens: int) -> float:
    moved = outcome.moved.get((source, Tier.HBM))
    return moved.tokens / tokens if moved is not None else 0.0


# ------------------------------------------------------------------ what one node finds


def found(work: Trace, tokens: int, *, by_price: bool) -> float:
    """Share of prompt tokens, prompts one by one: HBM holds one, DRAM the rest."""
    hosted = cluster("prefill:tp8,decode:tp8", work, Routing.LEAST_LOADED, ONE_PROMPT, tokens - ONE_PROMPT)
    if not by_price:
        for worker in hosted.workers.values():
            worker.tiers.pools[Tier.DRAM] = LeastRecent(worker.config.dram_pages)
    outcome = hosted.run(work, clients=1)
    hosted.check_all_ended()
    return sum(outcome.cached_tokens) / int(work.input_tokens.sum())


def kept_rows(work: Trace) -> Iterator[Kept]:
    prompts = replace(work, output_tokens=np.ones_like(work.output_tokens))
    for millions in map(float, FLAGS.kept):
        price, age = (found(prompts, round(1e6 * millions), by_price=each) for each in (True, False))
        published = FIGURE_9.get(round(millions), math.nan)
        yield Kept(millions, price, age, published, published - LOW <= price <= published)


# ------------------------------------------------------------------ four ways to route, and the last in two


def routed_rows(work: Trace) -> Iterator[Routed]:
    """Prompts alone: decoding would take most of the time, and nothing from the first token."""
    work = work.rows(np.arange(min(FLAGS.routed, len(work))))
    prompts = replace(work, output_tokens=np.ones_like(work.output_tokens))
    tokens = int(work.input_tokens.sum())
    for nodes in map(int, FLAGS.nodes):
        systems = {
            "random": (Routing.RANDOM, 0, False),
            "least loaded": (Routing.LEAST_LOADED, 0, False),
            "cache-aware": (Routing.CACHE_AWARE, 0, False),
            "global": (Routing.CACHE_AWARE, nodes * NODE_DRAM, False),
            "global, from each other": (Routing.CACHE_AWARE, 0, True),
        }
        for system, (routing, pool, peers) in systems.items():
            mesh = f"prefill:{nodes}xtp8,decode:{nodes}xtp8"
            hosted = cluster(mesh, prompts, routing, NODE_HBM, NODE_DRAM, pool, peers=peers)
            outcome = hosted.run(prompts)
            hosted.check_all_ended()
            ttft = outcome.values("TTFT")
            yield Routed(
                nodes,
                system,
                ttft_mean_s=float(ttft.mean()),
                ttft_p99_s=float(np.percentile(ttft, 99)),
                found=sum(outcome.cached_tokens) / tokens,
                from_dram=share(outcome, Tier.DRAM, tokens),
                from_pool=share(outcome, Tier.POOL, tokens),
                from_peers=share(outcome, Tier.PEER, tokens),
                published_s=FIGURE_5[system.partition(",")[0]],
            )


# ------------------------------------------------------------------ refused early


def refused_rows(work: Trace) -> Iterator[Refused]:
    work = work.rows(np.arange(min(FLAGS.hasty, len(work))))
    for haste in map(float, FLAGS.hastes):
        quick = work.at_rate(haste * work.rate_rps)
        for early in (False, True):
            hosted = cluster("prefill:8xtp8,decode:8xtp8", quick, Routing.CACHE_AWARE, NODE_HBM, NODE_DRAM)
            outcome = hosted.run(quick, asks=ASKS if early else None)
            hosted.check_all_ended()
            number, served = len(outcome.records), len(outcome.served)
            met = round(number * outcome.attainment(ASKS.ttft_s, ASKS.tpot_s))
            late, goodput = (served - met) / number, met / quick.span_s
            yield Refused(haste, early, met / number, late, 1 - served / number, goodput)


PARTS = {"kept": kept_rows, "routed": routed_rows, "refused": refused_rows}


def main() -> int:
    work, rows = conversation(), dict[str, list[dict[str, object]]]()
    for part in FLAGS.parts:
        rows[part] = []
        for row in PARTS[part](work):
            Console().print(row, highlight=False, soft_wrap=True)
            rows[part].append(asdict(row))
    if FLAGS.output:
        about = {"requests": len(work), "trace": TRACE if FLAGS.data_dir else EXCERPT.name}
        report.write_json(FLAGS.output, {**described(), **about, **rows})
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
