"""Would the answer be another if the question were a little different? The link halved, the objectives moved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jdisagg.core.errors import ConfigError
from jdisagg.sim.planner.problem import Problem
from jdisagg.sim.planner.search import BoundedCandidate, Counts, Found, Search, Shortlisted
from jdisagg.sim.planner.space import Candidate, Kind, Space

CHALLENGERS = 2  # of each architecture, besides the shortlist


@dataclass(frozen=True, slots=True)
class Varied:
    """goodput: of the old winner under the new question; best: whoever wins then, and its goodput."""

    name: str
    goodput: float
    winner: Candidate | None
    best: float
    changed: bool


def vary(
    found: Found, winner: Shortlisted, space: Space, questions: Mapping[str, Problem], like: Search
) -> tuple[list[Varied], Counts]:
    """Each of the questions, with one seed: the winner against the shortlist and the best bounds of each kind."""
    counts = Counts()
    return [_varied(name, problem, found, winner, space, like, counts) for name, problem in questions.items()], counts


def _varied(
    name: str, problem: Problem, found: Found, winner: Shortlisted, space: Space, like: Search, counts: Counts
) -> Varied:
    search = Search(problem, like.short, like.long, 1, like.tolerance, like.most, like.slack, like.on_progress, counts)
    feasible = _challengers(search, found, winner, space)
    own = [each for each in feasible if each.candidate == winner.candidate]
    if not feasible:
        return Varied(name, 0.0, None, 0.0, True)
    goodput = search.race(own, name)[0].goodput if own else 0.0
    others = [each for each in feasible if each.candidate != winner.candidate]
    better = [each for each in search.race(others, name, goodput * (1 + like.tolerance)) if each.exact]
    if better:
        return Varied(name, goodput, better[0].bounded.candidate, better[0].goodput, True)
    return Varied(name, goodput, winner.candidate, goodput, False)


def _challengers(search: Search, found: Found, winner: Shortlisted, space: Space) -> list[BoundedCandidate]:
    """Best bound first."""
    try:
        feasible = search.with_limits(space)
    except ConfigError:
        return []
    shortlist = {each.candidate for each in found.shortlist}
    chosen = [each for each in feasible if each.candidate in shortlist]
    missing = shortlist - {each.candidate for each in chosen}
    chosen += [each for each in map(search.bounded, sorted(missing, key=str)) if each]
    for kind in Kind:
        new = [each for each in feasible if each.candidate.kind is kind and each.candidate not in shortlist]
        chosen += new[:CHALLENGERS]
    return sorted(chosen, key=lambda each: -each.bound)
