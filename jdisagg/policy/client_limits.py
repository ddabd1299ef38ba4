"""Rate limits per client: requests and tokens a minute, and concurrent requests.

Rates are token buckets: a client may ask for a minute's allowance at once, which then fills again evenly. Tokens are
charged as a request may need them (prompt and output limit) and given back where it needed fewer. A request that is
larger than a whole minute's allowance is taken when the allowance is full, and the ones after it wait for its debt.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jdisagg.core.errors import ConfigError

MINUTE_S = 60.0
WORDS = ("requests", "tokens", "running")  # of --client_limits, in the order of Rates
MOST_CLIENTS = 10_000  # remembered: who asked for nothing for longest is forgotten first


@dataclass(frozen=True, slots=True)
class Rates:
    """The limits of one client; 0 means no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent_requests: int = 0

    @classmethod
    def parse(cls, text: str) -> Rates:
        """Parses --client_limits; raises ConfigError that names the bad entry."""
        found: dict[str, int] = {}
        for part in filter(None, text.split(",")):
            name, _, number = part.partition("=")
            if name not in WORDS or name in found or not (number.isdecimal() and int(number) > 0):
                raise ConfigError(
                    f"--client_limits={text}: {part!r} must be one of {', '.join(WORDS)}, once, with a number over 0"
                )
            found[name] = int(number)
        return cls(*(found.get(word, 0) for word in WORDS))


@dataclass(frozen=True, slots=True)
class RateStatus:
    """The rest of one rate: at most `limit`, and all of it again after `reset_s`."""

    name: str
    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class LimitProblem:
    """Which limit a request was over, and when it would not be."""

    limit: str
    allowed: int
    wait_s: float


@dataclass(slots=True)
class Bucket:
    """Filled at `per_minute`; may be in debt. No bucket where the rate is 0."""

    per_minute: int
    level: float
    at_s: float

    def fill(self, now_s: float) -> None:
        self.level = min(self.per_minute, self.level + max(0.0, now_s - self.at_s) * self.per_minute / MINUTE_S)
        self.at_s = max(self.at_s, now_s)

    def wait_s(self, amount: float) -> float:
        """Until so much is there, or all that can be; to the microsecond, so that sums of parts come to the whole."""
        return round(max(0.0, min(amount, self.per_minute) - self.level) * MINUTE_S / self.per_minute, 6)


@dataclass(slots=True)
class Client:
    buckets: dict[str, Bucket]
    running: int = 0

    @property
    def is_fresh(self) -> bool:
        return not self.running and all(each.level >= each.per_minute for each in self.buckets.values())


@dataclass(slots=True)
class ClientLimits:
    """The book of all clients. Times are of any clock that does not go back."""

    rates: Rates
    most_clients: int = MOST_CLIENTS
    _clients: dict[str, Client] = field(default_factory=dict[str, Client])  # who asked last is last

    def admit(self, name: str, tokens: int, now_s: float) -> LimitProblem | None:
        """Charges a request of at most `tokens` tokens to the client; nothing where it is refused."""
        client, limit = self._client(name, now_s), self.rates.concurrent_requests
        if limit and client.running >= limit:
            return LimitProblem("concurrent_requests", limit, 1.0)
        asked = {"requests": 1, "tokens": tokens}
        for rate, bucket in client.buckets.items():
            if (wait_s := bucket.wait_s(asked[rate])) > 0:
                return LimitProblem(f"{rate}_per_minute", bucket.per_minute, wait_s)
        for rate, bucket in client.buckets.items():
            bucket.level -= asked[rate]
        client.running += 1
        return None

    def settle(self, name: str, charged: int, used: int, now_s: float) -> None:
        """The end of a request that was admitted for `charged` tokens and took `used`."""
        client = self._client(name, now_s)
        client.running = max(0, client.running - 1)
        if bucket := client.buckets.get("tokens"):
            bucket.level = min(bucket.per_minute, bucket.level + max(0, charged - used))

    def allowances(self, name: str, now_s: float) -> list[RateStatus]:
        """Returns the rest of each rate of the client."""
        buckets = self._client(name, now_s).buckets
        return [
            RateStatus(rate, each.per_minute, max(0, int(each.level)), each.wait_s(each.per_minute))
            for rate, each in buckets.items()
        ]

    def _client(self, name: str, now_s: float) -> Client:
        client = self._clients.pop(name, None) or self._newcomer(now_s)
        self._clients[name] = client
        for bucket in client.buckets.values():
            bucket.fill(now_s)
        return client

    def _newcomer(self, now_s: float) -> Client:
        if len(self._clients) >= self.most_clients:
            self._forget(now_s)
        limits = {"requests": self.rates.requests_per_minute, "tokens": self.rates.tokens_per_minute}
        return Client({rate: Bucket(limit, limit, now_s) for rate, limit in limits.items() if limit})

    def _forget(self, now_s: float) -> None:
        """Drops clients with a full allowance; then, until a tenth of the places is free, idle clients that asked
        longest ago, so that a flood of addresses does not search all clients for each of them."""
        for client in self._clients.values():
            for bucket in client.buckets.values():
                bucket.fill(now_s)
        kept = {name: client for name, client in self._clients.items() if not client.is_fresh}
        over = len(kept) - (self.most_clients - 1 - self.most_clients // 10)
        for name in [name for name, client in kept.items() if not client.running][: max(0, over)]:
            del kept[name]
        self._clients = kept
