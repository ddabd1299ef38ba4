"""A real slow link on one machine: a network namespace behind a veth pair, whose far end is shaped by the kernel.

What runs in the namespace sends at the rate asked for (`tc`'s token bucket, behind the sockets, so that TCP meets it
as it would meet a switch); what it hears from this side is not shaped. It takes root, `ip` and `tc`.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

NUMBERS = itertools.count()
HERE, THERE = 1, 2  # last bytes of the addresses
LEAST_BURST_BYTES = 256 << 10  # a few of the largest segments
BURST_S = 0.001  # at the full rate: what the timers of the kernel need
QUEUE_BYTES = 16 << 20


class Unshapable(Exception):
    """No such link can be had here, in the kernel's words."""


@dataclass(frozen=True)
class Shaped:
    """A link that is up: `inside` before a command runs it behind the link, where its address is `there`."""

    name: str
    inside: tuple[str, ...]
    here: str
    there: str


@contextmanager
def shaped_link(gbit_per_s: float) -> Iterator[Shaped]:
    """Up to the end of the block. Raises Unshapable."""
    number, name = next(NUMBERS), f"jdisagg-{os.getpid()}"
    near, far = f"jdn{os.getpid() % 100000}x{number}", f"jdf{os.getpid() % 100000}x{number}"
    net = f"10.199.{number % 250}"
    space = f"{name}-{number}"
    inside = ("ip", "netns", "exec", space)
    burst_bytes = max(LEAST_BURST_BYTES, round(gbit_per_s * 1e9 / 8 * BURST_S))
    _must("ip", "netns", "add", space)
    try:
        _must("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", space)
        _must("ip", "addr", "add", f"{net}.{HERE}/30", "dev", near)
        _must("ip", "link", "set", near, "up")
        _must("ip", "-n", space, "addr", "add", f"{net}.{THERE}/30", "dev", far)
        _must("ip", "-n", space, "link", "set", far, "up")
        _must("ip", "-n", space, "link", "set", "lo", "up")
        rate = ("rate", f"{gbit_per_s}gbit", "burst", str(burst_bytes), "limit", str(QUEUE_BYTES))
        _must(*inside, "tc", "qdisc", "add", "dev", far, "root", "tbf", *rate)
        yield Shaped(space, inside, f"{net}.{HERE}", f"{net}.{THERE}")
    finally:
        subprocess.run(("ip", "netns", "del", space), capture_output=True, check=False)  # the pair goes with it


def _must(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise Unshapable(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise Unshapable(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
