"""Which of two routers leads. Each may be cut off from the other; the worker processes are the witnesses.

A router that leads tells the other one so, again and again: its lease, with its term and its members. The other takes
over when that has not been heard for `lease_s` *and* at least half of those members ask it to be taken: who asks one
router is not with the other, and promises to obey no lower term for a while. A router that leads and hears nothing of
the other goes on while more than half of its members are with it, and steps down otherwise. A half and more than a half
of the same members have one in common; so of two routers one leads. One that was started while cut off from the other
knows no more than the members that ask it say: it may lead those while the other leads the rest, until they meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

PROMISE_S = 3.0  # that who asked to be taken obeys nobody of a lower term
ASKED_S = 2.0  # that a router counts upon it: less, for clocks tick apart


class Rank(StrEnum):
    STANDING_BY = "standing by"
    LEADING = "leading"
    DEPOSED = "deposed"  # it led, and may not any more: its process ends, and starts again standing by


class Sign(StrEnum):
    """What may change a router's rank."""

    CALLED = "called"  # nobody leads, and enough of its members ask for it
    OUTRANKED = "outranked"  # there is a higher term
    FORSAKEN = "forsaken"  # neither the other router nor more than half of the members are with it


TABLE: Mapping[tuple[Rank, Sign], Rank] = MappingProxyType(
    {
        (Rank.STANDING_BY, Sign.CALLED): Rank.LEADING,
        (Rank.LEADING, Sign.OUTRANKED): Rank.DEPOSED,
        (Rank.LEADING, Sign.FORSAKEN): Rank.DEPOSED,
    }
)


class Witness:
    """A member's side: whom it may obey."""

    def __init__(self) -> None:
        self.term = 0  # the highest that it has obeyed
        self._promised, self._until_s = 0, 0.0

    def promise(self, term: int, now_s: float) -> None:
        """It has asked a router that would lead with this term. A promise is not made longer: when it is over, whoever
        led before has its turn."""
        if now_s >= self._until_s:
            self._promised, self._until_s = term, now_s + PROMISE_S

    def bound(self, now_s: float) -> bool:
        """Whether it has promised to obey nobody but whom it has asked."""
        return now_s < self._until_s

    def released(self, now_s: float) -> bool:
        """Whether a promise has run out since this was last asked."""
        over = 0.0 < self._until_s <= now_s
        self._until_s = 0.0 if over else self._until_s
        return over

    def may_ask(self, now_s: float) -> bool:
        """Whether its promise holds for as long as it would be counted upon."""
        return not self.bound(now_s) or self._until_s - now_s >= ASKED_S

    def obey(self, term: int, now_s: float) -> bool:
        """Whether it obeys a router of this term from now on."""
        promised = self._promised if now_s < self._until_s else 0
        if term < max(self.term, promised):
            return False
        self.term = term
        return True


@dataclass(frozen=True, slots=True)
class Lease:
    """What a router says to the other one."""

    term: int
    leading: bool
    members: tuple[str, ...] = ()


class Contender:
    """One router's side. Times are seconds of its own clock."""

    def __init__(self, first: bool, lease_s: float, now_s: float) -> None:
        """`first`: it leads where neither has led yet. `now_s`: it has heard nothing until now."""
        self.first, self.lease_s = first, lease_s
        self.rank, self.term = Rank.STANDING_BY, 0
        self.members = frozenset[str]()  # of the one that leads
        self._told = [frozenset[str]()]  # as the other may know them: what it last said it knows, and all since
        self.why = ""
        self._heard_s = now_s  # from when on the other's silence counts
        self._other: Lease | None = None  # what the other says; None: it is silent
        self.met = False  # it was, at any time
        self._called_s = now_s  # when it began to lead
        self._asked: dict[str, float] = {}

    @property
    def _linked(self) -> bool:
        return self._other is not None

    @property
    def _other_stands_by(self) -> bool:
        return self._other is not None and not self._other.leading

    @property
    def next_term(self) -> int:
        return self.term + 1

    @property
    def wants_promises(self) -> bool:
        """Whether it might lead soon: it hears of nobody who does."""
        return not (self._linked and not self._other_stands_by)

    @property
    def lease(self) -> Lease:
        return Lease(self.term, self.rank is Rank.LEADING, tuple(sorted(self.members)))

    def heard(self, lease: Lease, now_s: float) -> None:
        """The other router has said this."""
        self._other, self.met, self._heard_s = lease, True, now_s
        if self.rank is Rank.LEADING:
            known = frozenset(lease.members)
            if known in self._told:
                self._told = self._told[self._told.index(known) :]
            if lease.leading and (lease.term, not self.first) > (self.term, self.first):
                self._take(Sign.OUTRANKED, f"the other router leads with term {lease.term}, this one had {self.term}")
        elif lease.term >= self.term:
            self.term, self.members = lease.term, frozenset(lease.members)

    def silent(self) -> None:
        """The link with the other router has ended."""
        self._other = None

    def asked(self, member: str, term: int, known: Iterable[str], now_s: float) -> None:
        """A member asks to be taken; `term` is the highest that it has obeyed, and `known` are the members of then."""
        if term > self.term:
            if self.rank is Rank.LEADING:
                self._take(Sign.OUTRANKED, f"{member} has obeyed term {term}, this router had {self.term}")
                return
            self.term, self.members = term, frozenset(known)
        elif term == self.term and not self.members and self.rank is Rank.STANDING_BY:
            self.members = frozenset(known)
        self._asked[member] = now_s

    def look(self, with_it: Iterable[str], now_s: float) -> None:
        """Whether it is time to lead, or to lead no longer. `with_it`: the members whose links it holds."""
        if self.rank is Rank.STANDING_BY and self._is_called(now_s):
            self.term, self._told, self._called_s = self.term + 1, [self.members], now_s
            self._take(Sign.CALLED, f"leads with term {self.term}")
        elif self.rank is Rank.LEADING:
            present = frozenset(with_it)
            if self._linked:
                self.members = present
            if self._told[-1] != self.members:
                self._told.append(self.members)
            if not self._linked and now_s - self._called_s >= self.lease_s:  # those who called it are on their way
                self._count(present)

    def _count(self, present: frozenset[str]) -> None:
        for members in self._told:
            if 2 * len(members & present) <= len(members):
                here = f"{len(members & present)} of {len(members)} members are here"
                self._take(Sign.FORSAKEN, f"the other router is silent, and {here}")
                return

    def _is_called(self, now_s: float) -> bool:
        if self._linked:
            return self._other_stands_by and self.first
        if now_s - self._heard_s < self.lease_s * (1 if self.first or self.members else 2):
            return False
        asking = {member for member, at_s in self._asked.items() if now_s - at_s < ASKED_S}
        return bool(asking) and 2 * len(self.members & asking) >= len(self.members)

    def _take(self, sign: Sign, why: str) -> None:
        self.rank, self.why = TABLE[self.rank, sign], why
