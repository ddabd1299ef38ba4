"""Whether a process with workers alone is well, for who supervises it: GET /live and /ready by HTTP, and nothing more.

A thread of its own answers, so that a busy driver is not taken for a dead one.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from jdisagg.core.errors import ConfigError

CLIENT_S = 5.0  # that one who asks may take


class HealthServer:
    """Listens from its making on, and answers from `start` to `stop`; `answers` has a truth for each path."""

    def __init__(self, host: str, port: int, answers: Mapping[str, Callable[[], bool]]) -> None:
        """Raises ConfigError where the port cannot be had."""
        try:
            self._server = ThreadingHTTPServer((host, port), _answerer(answers))
        except OSError as error:
            why = f"cannot listen on {host}:{port} ({error.strerror or error})"
            raise ConfigError(f"--health_port={port}: {why}; give this process another --health_port") from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="health", daemon=True)

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(timeout=CLIENT_S)
        self._server.server_close()


def _answerer(answers: Mapping[str, Callable[[], bool]]) -> type[BaseHTTPRequestHandler]:
    class Answerer(BaseHTTPRequestHandler):
        timeout = CLIENT_S

        def do_GET(self) -> None:
            asked = answers.get(self.path.partition("?")[0])
            well = asked is not None and asked()
            body = json.dumps({"status": "ok" if well else "unavailable" if asked else "not found"}).encode()
            self.send_response(200 if well else 503 if asked else 404)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Probes come every few seconds: nothing is written."""

    return Answerer
