"""Log formats, text or JSON. Control characters in messages are escaped, so that clients cannot forge log lines."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

TEXT = "%(asctime)s %(name)s %(levelname)s %(message)s"
# The request that is being served, whose `request_id` JSON lines have; the id may still change.
SERVED: ContextVar[Mapping[str, Any] | None] = ContextVar("SERVED", default=None)


class OneLine(logging.Formatter):
    """A text format that escapes control characters and line ends of messages; tracebacks keep their lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in record.message)
        return super().formatMessage(record)


class JSONLine(logging.Formatter):
    """A JSON object per line: time (UTC), level, logger, message, and request_id, traceback and fields if any."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record as a JSON object; `fields` of its `extra` become keys."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        served = SERVED.get()
        if served is not None:
            line["request_id"] = served["request_id"]
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line | getattr(record, "fields", {}))


def write_logs(level: str, form: str) -> None:
    """Sends all log records to stderr from now on. `form` is "text" or "json"."""
    lines = logging.StreamHandler()
    lines.setFormatter(JSONLine() if form == "json" else OneLine(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[lines], force=True)
