"""A profile as a table for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from jdisagg.core.profile import Profile


def show_profile(console: Console, profile: Profile, path: str) -> None:
    """The least and the most of each kind, and what the devices share."""
    table = Table("", "least", "most", title=f"{profile.model} on {profile.mesh}, milliseconds", title_justify="left")
    for pool in profile.pools:
        for kind in (pool.prefill, pool.decode):
            if kind:
                found = [each.seconds for each in kind]
                name = "a chunk" if kind is pool.prefill else "a step"
                table.add_row(
                    f"{pool.config.role}: {name}", *(f"{1e3 * each:.2f}" for each in (min(found), max(found)))
                )
    if profile.transfers:
        found = [each.seconds for each in profile.transfers]
        table.add_row("a part of KV", *(f"{1e3 * each:.2f}" for each in (min(found), max(found))))
    table.add_row(
        "the host: a step, a chunk", f"{1e3 * profile.host.decode_s:.2f}", f"{1e3 * profile.host.prefill_s:.2f}"
    )
    console.print(table)
    for phase, row in profile.slowdown.items():
        beside = ", ".join(f"{100 * share:.0f} % longer beside {other}" for other, share in row.items())
        console.print(f"{phase}: {beside}", highlight=False)
    console.print(f"{profile.machine}; {profile.repeats} samples a case; written to {path}", highlight=False)
