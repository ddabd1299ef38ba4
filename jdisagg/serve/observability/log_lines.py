"""Log lines that stay lines: what others wrote into a message cannot pass for a line of ours."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

TEXT = "%(asctime)s %(name)s %(levelname)s %(message)s"
# What is said while a request is served is said of it; its `request_id` may yet change.
SERVED: ContextVar[Mapping[str, Any] | None] = ContextVar("SERVED", default=None)


class OneLine(logging.Formatter):
    """Control characters and line ends of a message are written as escapes; a traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in record.message)
        return super().formatMessage(record)


class JSONLine(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, and request_id, traceback and fields if any."""

    def format(self, record: logging.LogRecord) -> str:
        """`fields` of the record's `extra` become keys of the object."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        said: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        served = SERVED.get()
        if served is not None:
            said["request_id"] = served["request_id"]
        if record.exc_info:
            said["traceback"] = self.formatException(record.exc_info)
        return json.dumps(said | getattr(record, "fields", {}))


def write_logs(level: str, form: str) -> None:
    """Everything that is logged from now on goes to stderr. form: "text" or "json"."""
    lines = logging.StreamHandler()
    lines.setFormatter(JSONLine() if form == "json" else OneLine(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[lines], force=True)
