"""A bystander as a process of its own: one stream after the other and a look at /live, until its stdin closes.

`python tests/hostile/watcher.py URL KEY` prints "watching" once the first event came, and at the end what it felt, as
a line of JSON. Only the standard library, so that an attack that keeps the test's interpreter busy delays nothing here.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from urllib.parse import urlsplit

TIMEOUT_S = 120.0
LIVE_EVERY_S = 0.05
STREAM = {"prompt": "def bystander(n):", "max_tokens": 150, "temperature": 0, "stream": True, "ignore_eos": True}


@dataclass
class Felt:
    """What it was like. Gaps are between events of the streams, the wait for the next stream's first included."""

    events: int = 0
    longest_gap_s: float = 0.0
    live_calls: int = 0
    slowest_live_s: float = 0.0
    failures: list[str] = field(default_factory=list)


class Watcher:
    """`last_s` is when the last event came; at the end the wait since then counts as a gap too."""

    def __init__(self, url: str, key: str) -> None:
        self._place = urlsplit(url).netloc
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        self.felt, self.stop, self.began = Felt(), threading.Event(), threading.Event()
        self._last_s = 0.0

    def streams(self) -> None:
        while not self.stop.is_set():
            try:
                self._one_stream()
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._failed(f"stream: {error!r}")

    def _one_stream(self) -> None:
        connection = http.client.HTTPConnection(self._place, timeout=TIMEOUT_S)
        try:
            connection.request("POST", "/v1/completions", json.dumps(STREAM), self._headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise ValueError(f"status {answer.status}: {answer.read(300)!r}")
            last = b""
            for line in answer:
                if line.startswith(b"data: ") and not self.stop.is_set():
                    self._event()
                last = line.strip() or last
                if self.stop.is_set():
                    return
            if last != b"data: [DONE]":
                raise ValueError(f"the stream ended with {last[:300]!r}")
        finally:
            connection.close()

    def _event(self) -> None:
        now_s = time.monotonic()
        if self.began.is_set():
            self.felt.longest_gap_s = max(self.felt.longest_gap_s, now_s - self._last_s)
        self._last_s = now_s
        self.felt.events += 1
        self.began.set()

    def lives(self) -> None:
        self.began.wait()
        while not self.stop.is_set():
            began_s = time.monotonic()
            try:
                connection = http.client.HTTPConnection(self._place, timeout=TIMEOUT_S)
                connection.request("GET", "/live")
                status = connection.getresponse().status
                connection.close()
                if status != 200:
                    self._failed(f"/live: status {status}")
            except (OSError, http.client.HTTPException) as error:
                self._failed(f"/live: {error!r}")
            self.felt.live_calls += 1
            self.felt.slowest_live_s = max(self.felt.slowest_live_s, time.monotonic() - began_s)
            time.sleep(LIVE_EVERY_S)

    def _failed(self, what: str) -> None:
        self.felt.failures.append(what)
        time.sleep(LIVE_EVERY_S)

    def end(self) -> Felt:
        """Waits at most TIMEOUT_S for what is under way: an event that comes late is the very thing looked for."""
        before, end_s = self.felt.events, time.monotonic() + TIMEOUT_S
        while self.felt.events == before and time.monotonic() < end_s:
            time.sleep(0.005)
        self.stop.set()
        return self.felt


def main(url: str, key: str) -> None:
    watcher = Watcher(url, key)
    for work in (watcher.streams, watcher.lives):
        threading.Thread(target=work, daemon=True).start()
    if not watcher.began.wait(TIMEOUT_S):
        print(json.dumps(watcher.felt.failures[:5]), flush=True)
        return
    print("watching", flush=True)
    sys.stdin.read()
    print(json.dumps(asdict(watcher.end())), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3])
