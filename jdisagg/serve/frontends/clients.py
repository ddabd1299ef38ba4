"""Who a client is and what it may ask for: the same book for HTTP and gRPC."""

from __future__ import annotations

import hmac
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing

from jdisagg.core.errors import ConfigError
from jdisagg.core.request import Request
from jdisagg.policy.client_limits import ClientLimits, LimitProblem, RateStatus
from jdisagg.serve.deploy.private_files import read_private
from jdisagg.serve.driver.local_service import Batch
from jdisagg.serve.driver.service import Rejected
from jdisagg.serve.frontends.front_settings import FrontSettings

ADMIN = "admin"  # the name of the key that opens /admin, and is no client's
SHORTEST_ADMIN_KEY = 16


class RateLimited(Rejected):
    """A client is over what it may ask for; `allowances` are what is left to it (HTTP 429)."""

    def __init__(self, refusal: LimitProblem, allowances: Sequence[RateStatus]) -> None:
        super().__init__(f"over the limit of {refusal.allowed} {refusal.limit} for one client", refusal.wait_s)
        self.allowances = tuple(allowances)


class Clients:
    """Keys, and limits by key; without keys, limits by address. Called on the event loop."""

    def __init__(
        self, settings: FrontSettings, now_s: Callable[[], float], note: Callable[[str], None] = lambda limit: None
    ) -> None:
        """`note` is told the limit that a request was over."""
        alone = {"": settings.api_key} if settings.api_key else {}
        self._keys = {name: f"Bearer {key}".encode() for name, key in {**alone, **settings.api_keys}.items()}
        self._limits, self._now_s, self._note = ClientLimits(settings.rates), now_s, note

    def recognised(self, authorization: str, address: str) -> str | None:
        """The name of a client by its header and address; None: its key is missing or wrong."""
        if not self._keys:
            return f"address {address}"
        given = authorization.encode()  # every key is compared, so that the time tells nothing
        found = [name for name, key in self._keys.items() if hmac.compare_digest(given, key)]
        return f"key {found[0]}" if found else None

    async def metered(
        self, client: str, prompt_tokens: int, requests: Sequence[Request], batches: AsyncGenerator[Batch]
    ) -> AsyncGenerator[Batch]:
        """The answers to one call of a client, charged to it. Raises RateLimited before the first batch."""
        charged, used = prompt_tokens + sum(each.sampling.max_tokens for each in requests), prompt_tokens
        refusal = self._limits.admit(client, charged, self._now_s())
        if refusal is not None:
            self._note(refusal.limit)
            raise RateLimited(refusal, self.allowances(client))
        try:
            async with aclosing(batches):
                async for batch in batches:
                    used += sum(len(piece.delta.sampled) for _, piece in batch)
                    yield batch
        finally:
            self._limits.settle(client, charged, used, self._now_s())

    def allowances(self, client: str) -> list[RateStatus]:
        return self._limits.allowances(client, self._now_s())


def read_keys(path: str) -> Mapping[str, str]:
    """Keys by name: the file has a name and a key a line, and only its owner may read it. Raises ConfigError."""
    found: dict[str, str] = {}
    text = read_private("api_keys_file", path).decode("ascii", errors="replace")
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or not all(word.isascii() and word.isprintable() for word in words):
            raise ConfigError(f"--api_keys_file={path}: line {number} must be a name and a key of printable ASCII")
        if words[0] in found or words[1] in found.values():
            raise ConfigError(f"--api_keys_file={path}: line {number} has the name {words[0]!r}, or its key, again")
        found[words[0]] = words[1]
    if len(found.get(ADMIN, " " * SHORTEST_ADMIN_KEY)) < SHORTEST_ADMIN_KEY:
        raise ConfigError(
            f"--api_keys_file={path}: the key of admin has {len(found[ADMIN])} characters, needs {SHORTEST_ADMIN_KEY}"
        )
    if not found:
        raise ConfigError(f"--api_keys_file={path}: holds no key")
    return found
