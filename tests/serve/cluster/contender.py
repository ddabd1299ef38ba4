"""A process that competes for a lease and writes a line for every act it does as leader: `time term`.

python -m tests.serve.cluster.contender SPEC ADDRESS TTL_S FILE [FLOOR]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from jdisagg.serve.cluster.leadership import Leadership
from jdisagg.serve.cluster.link import Link
from tests.serve.cluster.coordination_services import lease_at


class SilentNode:
    """A router that ignores its members."""

    def admit(self, link: Link, hello: dict[str, Any]) -> dict[str, Any]:
        return {}

    def on_joined(self, link: Link) -> None: ...
    def on_message(self, link: Link, body: dict[str, Any]) -> None: ...
    def on_lost(self, link: Link, why: str) -> None: ...


def main(spec: str, address: str, ttl_s: float, path: Path) -> None:
    ends: list[str] = []
    leadership = Leadership(SilentNode(), lease_at(spec, address, ttl_s), ttl_s, lambda term: None, ends.append)
    leadership.start()
    with path.open("a", buffering=1) as acts:
        while not ends:
            now_s = time.monotonic()  # before the check: the process may be stopped behind it
            if leadership.is_leader:
                acts.write(f"{now_s} {leadership.term}\n")
            time.sleep(0.01)
    print(ends[0])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), Path(sys.argv[4]))
