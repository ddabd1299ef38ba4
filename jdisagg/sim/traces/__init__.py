"""Workloads: who asks for how much, and when. Files others published, and arrivals drawn from a seed.

`Trace` is the one shape of them all; `files` reads the public formats; `arrivals` makes times for lengths that have
none, and scales, cuts and splits traces. Everything is deterministic: equal inputs and seeds, equal traces.
"""

from jdisagg.sim.traces.files import read_azure, read_lengths, read_mooncake, read_servegen_clients, read_servegen_rates
from jdisagg.sim.traces.trace import Trace, closed_loop, one_after_another, poisson, spread_ticks, varying_rate

__all__ = [
    "Trace",
    "closed_loop",
    "one_after_another",
    "poisson",
    "read_azure",
    "read_lengths",
    "read_mooncake",
    "read_servegen_clients",
    "read_servegen_rates",
    "spread_ticks",
    "varying_rate",
]
