"""The other process of a conformance test: does what lines of JSON on stdin ask, one after another, and answers so."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdisagg.core.errors import JdisaggError
from jdisagg.kv.transport.choose import open_transport
from jdisagg.kv.transport.config import Identity, TransportConfig
from jdisagg.kv.transport.ticket import DTYPES, TransferId, Transport, read_ticket

SECRET = b"a secret of the conformance tests"
IDENTITY = Identity("model-a", "8x64x32", "float32")
LONG_TURNS = 600
CONTROL_S = 30.0  # a peer on a busy machine is slow and not dead


@jax.jit
def long_program(x: jax.Array) -> jax.Array:
    """The same bytes, some time later."""
    work = jax.lax.fori_loop(0, LONG_TURNS, lambda _, w: jnp.tanh(w @ w), jnp.eye(256))
    return jnp.where(work[0, 0] > 9, jnp.zeros_like(x), x)


def make_arrays(count: int, nbytes: int, seed: int, dtype: str = "float32", late: bool = False) -> list[jax.Array]:
    """Random bytes, dealt over the devices; `late` ones are still being computed."""
    rng, devices = np.random.default_rng(seed), jax.devices()
    made = []
    for index in range(count):
        count_of_values = nbytes // DTYPES[dtype].itemsize
        few = rng.integers(0, 64, min(count_of_values, 100_003)).astype(DTYPES[dtype])
        values = np.resize(few, count_of_values).reshape(2, -1)
        made.append(jax.device_put(values, devices[index % len(devices)]))
    return [long_program(array) for array in made] if late else made


def digests(arrays: list[jax.Array]) -> list[str]:
    return [hashlib.sha256(np.asarray(array).tobytes()).hexdigest()[:16] for array in arrays]


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class Side:
    """One process's transports, driven by commands; the tests use one of their own in their own process."""

    def __init__(self, names: list[str], listen: dict[str, str] | None = None, **options: Any) -> None:
        self.before = open_descriptors()
        self.transports: dict[str, Transport] = {}
        for name in names:
            at = (listen or {}).get(name, "127.0.0.1:0")
            config = TransportConfig(SECRET, IDENTITY, at, **{"control_timeout_s": CONTROL_S, **options})
            self.transports[name] = open_transport(name, config)

    def offer(self, transport: str, in_s: float = 120.0, transfer: str = "h", **what: Any) -> dict[str, Any]:
        arrays = make_arrays(**what)
        ticket = self.transports[transport].offer(TransferId(transfer, 1), arrays, time.monotonic() + in_s)
        return {"ticket": ticket.to_json()} | ({} if what.get("late") else {"digests": digests(arrays)})

    def offer_deleted(self, transport: str, **what: Any) -> dict[str, Any]:
        arrays = make_arrays(**what)
        ticket = self.transports[transport].offer(TransferId("h", 1), arrays, time.monotonic() + 120)
        arrays[-1].delete()
        return {"ticket": ticket.to_json()}

    def close_offers(self, transport: str) -> dict[str, Any]:
        """Ends all offers, as if their deadlines had passed."""
        return {"ended": len(self.transports[transport].expire(float("inf")))}

    def pull(self, ticket: dict[str, Any], in_s: float = 120.0) -> dict[str, Any]:
        read = read_ticket(ticket)
        devices = [jax.devices()[index % len(jax.devices())] for index in range(len(read.arrays))]
        arrays = self.transports[read.transport].pull(read, devices, time.monotonic() + in_s)
        assert [next(iter(array.devices())) for array in arrays] == devices
        return {"digests": digests(arrays)}

    def ack(self, ticket: dict[str, Any]) -> dict[str, Any]:
        gc.collect()
        return {"told": self.transports[ticket["transport"]].ack(read_ticket(ticket))}

    def cancel(self, ticket: dict[str, Any]) -> dict[str, Any]:
        return {"told": self.transports[ticket["transport"]].cancel(read_ticket(ticket))}

    def held(self, transport: str) -> dict[str, Any]:
        gc.collect()  # jax lets go of memory it adopted at its next call, or now
        held = self.transports[transport].held()
        return {"offers": held.offers, "offer_bytes": held.offer_bytes, "pull_bytes": held.pull_bytes}

    def close(self) -> dict[str, Any]:
        """Closes everything; what is left over."""
        for transport in self.transports.values():
            transport.close()
        gc.collect()
        threads = [each.name for each in threading.enumerate() if each.name.startswith("kv-")]
        return {"threads": threads, "descriptors": open_descriptors() - self.before}


def main() -> None:
    options = json.loads(sys.argv[1])
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries may print
    jax.block_until_ready(long_program(jnp.zeros((2, 4))))
    side = Side(**options)
    print(
        json.dumps({"ready": {name: each.address for name, each in side.transports.items()}}), file=answers, flush=True
    )
    for line in sys.stdin:
        command = json.loads(line)
        started_s = time.monotonic()
        try:
            answer = getattr(side, command.pop("do"))(**command)
        except JdisaggError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(answer | {"took_s": time.monotonic() - started_s}), file=answers, flush=True)


if __name__ == "__main__":
    main()
