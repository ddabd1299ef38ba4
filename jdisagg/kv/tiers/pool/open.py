"""The pool that a URL names."""

from __future__ import annotations

from importlib import import_module

from jdisagg.core.errors import ConfigError
from jdisagg.kv.tiers.store import Store

BACKENDS = {
    "redis": "redis",
    "rediss": "redis",
    "unix": "redis",
    "s3": "objects",
    "gs": "objects",
    "file": "objects",
    "mooncake": "mooncake",
}
EXTRAS = {"mooncake": "mooncake"}  # that bring a backend's package
TTL_S = 24 * 3600.0  # that nobody asked for a page
TIMEOUT_S = 2.0  # for one batch: longer than that it is rarely worth waiting for


def open_pool(url: str, fingerprint: str, *, ttl_s: float = TTL_S, timeout_s: float = TIMEOUT_S) -> Store:
    """Raises ConfigError where there is no such backend, or its package is missing."""
    scheme = url.partition("://")[0]
    backend = BACKENDS.get(scheme)
    if backend is None or "://" not in url:
        known = ", ".join(f"{each}://" for each in BACKENDS)
        raise ConfigError(f"--pool={url!r} must begin with one of {known}")
    try:
        module = import_module(f"jdisagg.kv.tiers.pool.{backend}")
    except ImportError as error:
        raise ConfigError(
            f"--pool={url}: {error.name} is not installed; pip install 'jdisagg[{EXTRAS.get(scheme, 'pool')}]' does it"
        ) from error
    try:
        return module.open_pool(url, fingerprint, ttl_s=ttl_s, timeout_s=timeout_s)
    except Exception as error:
        raise ConfigError(f"--pool={url}: {type(error).__name__}: {str(error)[:200]}") from error
