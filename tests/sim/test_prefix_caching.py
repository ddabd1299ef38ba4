"""Kept KV in the simulated cluster: what is found again is what the trace repeats, and it saves what it should."""

import csv
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from jdisagg.commands.sim import main
from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.core.router_config import Routing
from jdisagg.core.worker_config import Role
from jdisagg.sim.arithmetic import model
from jdisagg.sim.cluster import PATIENT, Cluster
from jdisagg.sim.cluster_spec import by_roofline, cluster_spec, longest, plain_settings
from jdisagg.sim.cost_models import Model, Roofline
from jdisagg.sim.hardware import hardware
from jdisagg.sim.outcome import Outcome
from jdisagg.sim.traces import Trace, read_mooncake, spread_ticks
from tests.published.full_files import full_file
from tests.published.prefix_replay import reuse

EXCERPT = Path(__file__).parents[1] / "fixtures" / "traces" / "mooncake_conversation_first_300.jsonl.gz"
PAIR = "prefill:tp8,decode:tp8"
FOUR = "prefill:4xtp8,decode:4xtp8"
ENOUGH = 200_000  # pages, for the whole excerpt


@cache
def excerpt() -> Trace:
    return spread_ticks(read_mooncake(EXCERPT))


def cluster(
    mesh: str, work: Trace, routing: Routing = Routing.LEAST_LOADED, pages: int = 0, fast_forward: bool = True, **sizes
) -> Cluster:
    """Of Llama-3-70B on H100s. pages: of every worker; 0: as many as have room."""
    chip, shape = hardware("h100"), Model(model("llama3-70b"))
    given = cluster_spec(
        MeshSpec.parse(mesh),
        plain_settings(longest(work), max_num_seqs=256, **{"page_size": 64, "prefix_caching": "on", **sizes}),
        by_roofline(lambda tp: Roofline(shape, chip, tp)),
        50e9,
    )
    workers = [replace(config, num_pages=pages or config.num_pages) for config in given.workers]
    router = replace(PATIENT, routing=routing)
    return Cluster(workers, given.costs, given.links, router=router, fast_forward=fast_forward)


def run(mesh: str, work: Trace, *args, clients: int = 0, **sizes) -> Outcome:
    hosted = cluster(mesh, work, *args, **sizes)
    outcome = hosted.run(work, clients=clients)
    hosted.check_all_ended()
    for worker in hosted.workers.values():
        worker.check_invariants()
    return outcome


def signature(outcome: Outcome) -> list:
    return [(r.request_id, r.first_s, r.last_s, r.end_s, r.prefill_worker, r.decode_worker) for r in outcome.records]


def hit_rate(outcome: Outcome) -> float:
    return sum(outcome.cached_tokens) / sum(record.input_tokens for record in outcome.records)


@pytest.mark.parametrize(("mesh", "page_size"), [(PAIR, 64), (PAIR, 512), ("colocated:tp8", 512)])
def test_one_worker_with_room_for_all_finds_what_the_trace_repeats(mesh, page_size):
    """Of each request, in whole pages, and never that of its last token, which is computed."""
    work = excerpt()
    outcome = run(mesh, work, pages=ENOUGH, clients=1, page_size=page_size)
    repeated = reuse(work, np.inf).hit_tokens
    readable = (work.input_tokens - 1) // page_size * page_size
    ideal = np.minimum(repeated // page_size * page_size, readable)
    assert ideal.sum() > 0 and outcome.cached_tokens == ideal.tolist()
    for lookups in outcome.lookups.values():
        assert lookups.looked_up == work.input_tokens.sum() and lookups.found >= ideal.sum()


def test_as_recorded_it_finds_hardly_less():
    """Requests that begin alike and come at once may both be computed."""
    work = excerpt().at_rate(0.5)
    found, most = hit_rate(run(PAIR, work, pages=ENOUGH, page_size=512)), reuse(work, np.inf).token_share
    assert 0.9 * most < found < most


def found_with_room_for(pages: int, work: Trace) -> tuple[float, float]:
    """Shares of prompt tokens that are found: in the cluster, prompts one by one, and in a cache of whole blocks."""
    prompts = replace(work, output_tokens=np.ones_like(work.output_tokens))
    outcome = run(PAIR, prompts, pages=pages, clients=1, page_size=512)
    return hit_rate(outcome), reuse(work, 512 * pages).token_share


def test_room_for_less_finds_less_as_in_a_cache_of_that_size():
    rates = [found_with_room_for(pages, excerpt()) for pages in (1000, 4000, ENOUGH)]
    assert 0 < rates[0][0] < rates[1][0] < rates[2][0]
    assert [ours for ours, _ in rates] == pytest.approx([blocks for _, blocks in rates], abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "published"), [(1e6, 0.087), (3e6, 0.165), (1e7, 0.326), (5e7, 0.398)])
def test_the_whole_trace_is_found_again_as_the_replay_and_mooncake_say(request, tokens, published):
    """Figure 9 of Qin et al., FAST 2025, whose blocks have 256 tokens: the band is that of the replay."""
    work = read_mooncake(full_file(request, "mooncake_fast25_conversation.jsonl.gz"))
    ours, replayed = found_with_room_for(int(tokens // 512), work)
    assert ours == pytest.approx(replayed, abs=0.01) and published - 0.045 <= ours <= published


def test_cache_aware_routing_finds_more_than_turns_do_and_first_tokens_come_earlier():
    work, routings = excerpt().rows(np.arange(200)), (Routing.ROUND_ROBIN, Routing.CACHE_AWARE)
    turns, aware = (run(FOUR, work, routing, page_size=512) for routing in routings)
    assert hit_rate(aware) > hit_rate(turns) > 0
    assert aware.values("TTFT").mean() < turns.values("TTFT").mean()
    assert aware.lookups[Role.PREFILL].hit_rate == hit_rate(aware)


def test_what_is_found_is_neither_computed_nor_shipped():
    """The same prompt twice: the second computes its last page, and ships what its decode worker lacks."""
    names = (tuple(range(8)),) * 2
    work = Trace(np.array([0.0, 60.0]), np.array([4096, 4096]), np.array([2, 2]), names, 512)
    first, second = run(PAIR, work).records
    assert first.ledger is not None and second.ledger is not None
    assert (first.ledger.cached_tokens, second.ledger.cached_tokens) == (0, 4096 - 64)
    parts = [ledger.parts_ns() for ledger in (first.ledger, second.ledger)]
    assert parts[1]["prefill"] < parts[0]["prefill"] / 3 and parts[1]["transfer"] < parts[0]["transfer"]


@pytest.mark.parametrize("routing", [Routing.LEAST_LOADED, Routing.CACHE_AWARE])
def test_without_caches_names_change_nothing(routing):
    work = excerpt().rows(np.arange(60))
    named, unnamed = (run(FOUR, each, routing, prefix_caching=False) for each in (work, work.unnamed()))
    assert signature(named) == signature(unnamed) and named.events == unnamed.events
    assert not any(named.cached_tokens) and not named.lookups


@pytest.mark.parametrize("mesh", [PAIR, "colocated:2xtp8"])
def test_foreseen_steps_end_as_taken_ones_where_pages_are_kept(mesh):
    """In pools that are full of kept pages."""
    work = excerpt().rows(np.arange(40))
    ahead, one_by_one = (run(mesh, work, pages=3000, fast_forward=each) for each in (True, False))
    assert signature(ahead) == signature(one_by_one) and ahead.cached_tokens == one_by_one.cached_tokens
    assert ahead.events < one_by_one.events


def test_rows_that_are_drawn_again_are_other_conversations():
    assert excerpt().sample(20, seed=1).block_hashes == ()


def test_the_command_says_what_was_found_again(tmp_path, capsys):
    flags = [
        *(f"--trace=mooncake:{EXCERPT}", "--mesh=prefill:2xtp8,decode:2xtp8", "--model=llama3-70b", "--page_size=512"),
        *("--requests=40", f"--csv={tmp_path / 'rows.csv'}", f"--json={tmp_path / 'run.json'}"),
    ]
    assert main(["sim", *flags, "--routing=cache_aware"]) == 0
    said = capsys.readouterr().out
    told = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    rows = list(csv.DictReader((tmp_path / "rows.csv").read_text(encoding="utf-8").splitlines()))
    assert sum(int(row["cached_tokens"]) for row in rows) == told["cached_tokens"] > 0
    rate = told["prefix_cache"]["prefill"]["hit_rate"]
    assert f"of prompt tokens, {rate:.1%} on prefill workers" in said and told["ttft_s"]["p99"] > 0
    assert main(["sim", *flags, "--prefix_caching=off"]) == 0
    told = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert told["cached_tokens"] == 0 and not told["prefix_cache"]
    assert "were there already" not in capsys.readouterr().out
