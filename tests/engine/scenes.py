"""What the processes of one world do in tests, and one process alone to compare: each returns something for JSON."""

from dataclasses import replace

import jax
import numpy as np

from jdisagg.core.request import SamplingParams
from jdisagg.core.worker_config import Role
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.model.names import Index
from jdisagg.model.sources import RandomSource
from tests.engine.stacks import CONFIG, GREEDY, HALVES, generate, mixed_prompts, open_machine, open_ring, tokens_of

PROMPTS = mixed_prompts(12, longest=60)
TURNS = 9
SAMPLING = [
    GREEDY,
    SamplingParams(temperature=0.9, seed=5, top_p=0.9),
    replace(GREEDY, frequency_penalty=1.5, repetition_penalty=1.2),
    replace(GREEDY, logprobs=2),
]


def tp2() -> list[list[int]]:
    """Prefill and decode by two shards each, on the same devices or, where each process has two, on one of each."""
    each = len(jax.local_devices())
    found = jax.devices()
    source = open_machine(Role.PREFILL, HALVES, found[::each])
    destination = open_machine(Role.DECODE, (range(4),), found[each - 1 :: each])
    source.warm(peers=[destination])
    destination.warm()
    rows = generate(source, destination, PROMPTS, TURNS, [SAMPLING[n % len(SAMPLING)] for n in range(len(PROMPTS))])
    assert [machine.recompiles() for machine in (source, destination)] == [0, 0]
    return tokens_of(rows)


def ring_of_two() -> list[list[int]]:
    """A stage of a ring in each process. Each prefills all for itself, and brings its own stage the layers it needs."""
    source, destination = open_machine(Role.PREFILL, HALVES, jax.local_devices()), open_ring(2, 1)
    source.warm(peers=[destination])
    destination.warm()
    rows = generate(source, destination, PROMPTS, TURNS, [SAMPLING[n % len(SAMPLING)] for n in range(len(PROMPTS))])
    assert [machine.recompiles() for machine in (source, destination)] == [0, 0]
    return tokens_of(rows)


class CountedSource(RandomSource):
    """Notes how many bytes were read."""

    read_bytes = 0

    def read(self, name: str, index: Index) -> np.ndarray:
        found = super().read(name, index)
        self.read_bytes += found.nbytes
        return found


def bytes_read() -> list[int]:
    """That loading a mesh of two shards took here, and a ring of two stages."""
    found = []
    for make in (lambda source: open_machine(Role.PREFILL, HALVES, jax.devices()[-2:], source=source), ring_of):
        source = CountedSource(CONFIG, seed=3)
        make(source)
        found.append(source.read_bytes)
    return found


def ring_of(source: RandomSource) -> MeshExecutor:
    return open_ring(2, 1, source=source)
