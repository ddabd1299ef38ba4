"""The handshake: both ends prove that they know the secret, then show what they run.

Challenge and response by HMAC-SHA256 over two fresh nonces, the role and the identity, so that nothing of it can be
replayed or reflected. An end of another identity learns ours only after it has proved that it is of the cluster.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from dataclasses import asdict, fields
from typing import Any

from jdisagg.core.errors import BadTicket, PeerMismatch
from jdisagg.kv.transport.config import Identity, TransportConfig
from jdisagg.kv.transport.connection import Connection
from jdisagg.kv.transport.deadline import Deadline

PROTOCOL = 1
NONCE_BYTES = 32
HANDSHAKE_BYTES = 8 << 10  # the longest record of a handshake


def answer(connection: Connection, config: TransportConfig, deadline: Deadline) -> None:
    """The source's part. Raises PeerMismatch after telling the peer."""
    nonce = secrets.token_hex(NONCE_BYTES)
    connection.send_record({"jdisagg": PROTOCOL, "nonce": nonce}, deadline)
    theirs = connection.receive_record(deadline, HANDSHAKE_BYTES)
    if not _proves(theirs, "pulls", nonce + _nonce(theirs), config.secret):
        connection.send_record({"refused": "secret"}, deadline)
        raise PeerMismatch(f"{connection.peer} does not share our secret")
    connection.send_record(_proof("offers", nonce + _nonce(theirs), config), deadline)
    compare(config.identity, theirs["identity"], connection.peer)


def greet(connection: Connection, config: TransportConfig, deadline: Deadline) -> None:
    """The destination's part. Raises PeerMismatch."""
    theirs = connection.receive_record(deadline, HANDSHAKE_BYTES)
    if theirs.get("jdisagg") != PROTOCOL:
        said = f"{connection.peer} speaks protocol {theirs.get('jdisagg')!r:.40}"
        raise PeerMismatch(f"{said}, we speak {PROTOCOL}: install the same jdisagg")
    nonce = secrets.token_hex(NONCE_BYTES)
    both = _nonce(theirs) + nonce
    connection.send_record({"nonce": nonce} | _proof("pulls", both, config), deadline)
    reply = connection.receive_record(deadline, HANDSHAKE_BYTES)
    if not _proves(reply, "offers", both, config.secret):
        raise PeerMismatch(f"{connection.peer} does not share our secret")
    compare(config.identity, reply["identity"], connection.peer)


def compare(ours: Identity, record: Any, peer: str) -> None:
    """Raises PeerMismatch with both fingerprints and the fields that differ."""
    try:
        theirs = Identity(**{each.name: str(record[each.name]) for each in fields(Identity)})
    except (KeyError, TypeError) as error:
        raise PeerMismatch(f"{peer} shows no identity that we can read: {str(record)[:80]}") from error
    mine, other = asdict(ours), asdict(theirs)
    differing = [f"{name} {other[name]!r} there, {mine[name]!r} here" for name in mine if mine[name] != other[name]]
    if differing:
        prints = f"fingerprint {theirs.fingerprint} there, {ours.fingerprint} here"
        remedy = "start both with the same version, --model, --mesh and dtypes"
        raise PeerMismatch(f"{peer} is not of our kind ({prints}): {'; '.join(differing)}; {remedy}")


def _nonce(record: dict[str, Any]) -> str:
    nonce = record.get("nonce")
    if not isinstance(nonce, str) or len(nonce) != 2 * NONCE_BYTES:
        raise BadTicket(f"a handshake needs a nonce of {2 * NONCE_BYTES} hex digits, got {str(nonce)[:20]!r}")
    return nonce


def _proof(role: str, nonces: str, config: TransportConfig) -> dict[str, Any]:
    identity = asdict(config.identity)
    return {"identity": identity, "mac": _mac(role, nonces, identity, config.secret)}


def _proves(record: dict[str, Any], role: str, nonces: str, secret: bytes) -> bool:
    mac = record.get("mac")
    wanted = _mac(role, nonces, record.get("identity"), secret)
    return isinstance(mac, str) and hmac.compare_digest(mac.encode(errors="replace"), wanted.encode())


def _mac(role: str, nonces: str, identity: Any, secret: bytes) -> str:
    text = json.dumps(["jdisagg", PROTOCOL, role, nonces, identity], sort_keys=True)
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()
