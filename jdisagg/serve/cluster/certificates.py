"""TLS by flag: for the control link (gRPC) and for KV over tcp, both from the same certificate and authority.

With --tls_ca every end must show a certificate of that authority; without it, clients trust the system's authorities
and servers ask for none. The shared secret is asked for in any case.
"""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from jdisagg.core.errors import ConfigError
from jdisagg.core.settings import Settings
from jdisagg.serve.deploy.private_files import read_private


def server_credentials(settings: Settings) -> grpc.ServerCredentials | None:
    """For the control port; None without TLS. Raises ConfigError."""
    if not wants_tls(settings):
        return None
    authority = _read("tls_ca", settings.tls_ca)
    pair = [(read_private("tls_key", settings.tls_key), _read("tls_cert", settings.tls_cert))]
    return grpc.ssl_server_credentials(pair, authority or None, require_client_auth=bool(authority))


def channel_credentials(settings: Settings) -> grpc.ChannelCredentials | None:
    if not wants_tls(settings):
        return None
    key, cert = read_private("tls_key", settings.tls_key), _read("tls_cert", settings.tls_cert)
    return grpc.ssl_channel_credentials(_read("tls_ca", settings.tls_ca) or None, key, cert)


def kv_contexts(settings: Settings) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
    """Where KV is offered, and where it is pulled. Raises ConfigError."""
    if not wants_tls(settings):
        return None, None
    read_private("tls_key", settings.tls_key)  # ssl reads it for itself: only its mode is looked at
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        client = ssl.create_default_context(cafile=settings.tls_ca or None)
        for each in (server, client):
            each.minimum_version = ssl.TLSVersion.TLSv1_2
            each.load_cert_chain(settings.tls_cert, settings.tls_key)
        if settings.tls_ca:
            server.load_verify_locations(settings.tls_ca)
            server.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"--tls_cert={settings.tls_cert} --tls_key={settings.tls_key}: {error}") from error
    return server, client


def wants_tls(settings: Settings) -> bool:
    """Raises ConfigError where only a part of it is given."""
    if bool(settings.tls_cert) != bool(settings.tls_key):
        raise ConfigError(f"--tls_cert={settings.tls_cert!r} and --tls_key={settings.tls_key!r}: give both or neither")
    if settings.tls_ca and not settings.tls_cert:
        raise ConfigError(f"--tls_ca={settings.tls_ca} needs --tls_cert and --tls_key: every process serves others")
    return bool(settings.tls_cert)


def _read(flag: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes() if path else b""
    except OSError as error:
        raise ConfigError(f"--{flag}={path}: {error.strerror}") from error
