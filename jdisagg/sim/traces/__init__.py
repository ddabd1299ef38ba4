"""Request traces: files that others published, and arrivals drawn from a seed.

`Trace` is the common form; `files` reads the public formats; `trace` also draws arrival times for traces without
them, and scales, cuts and splits traces. Everything is deterministic: equal inputs and seeds give equal traces.
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
