"""Lines for the log: as text or as JSON, with the request they belong to; never what a client sent as input.

A log that cannot be written to, such as one on a full disk, loses lines and breaks nothing.
"""

from __future__ import annotations

import logging
import time
from typing import TextIO

import orjson

from ivy_gateway import request_context

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s%(request)s"


def set_up(level: str, log_format: str, stream: TextIO | None = None) -> None:
    """Write every logger's lines of `level` and above to `stream` (stderr), as `text` or `json`."""
    handler = _Handler(stream)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter(_TEXT))
    handler.addFilter(_add_request)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class _Handler(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the line: there is nowhere to say that it could not be written."""


def _add_request(record: logging.LogRecord) -> bool:
    record.request_id = request_context.current().request_id
    return True


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        request_id = getattr(record, "request_id", "")
        record.request = f" request_id={request_id}" if request_id else ""
        return super().format(record)


class _JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, request_id; what a call gave as `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := getattr(record, "request_id", ""):
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()
