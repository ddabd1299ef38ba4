"""Log lines that stay lines: what others wrote into a message cannot pass for a line of ours."""

from __future__ import annotations

import logging


class OneLine(logging.Formatter):
    """Control characters and line ends of a message are written as escapes; a traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in record.message)
        return super().formatMessage(record)
