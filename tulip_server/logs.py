"""Log lines, as text or JSON, written by a thread of their own: a full disk, a broken or a blocked pipe costs
lines and nothing else.

A line that is about a chunk carries its request's id and its trace's; none carries input. Knows nothing of
what is logged.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TextIO

_WAITING_LINES = 10_000  # beyond these, lines are dropped
_LAST_LINES_SECONDS = 1.0  # for what still waits when the process ends
_LONGEST_ID = 128
_ORIGIN = ("request_id", "trace_id")


def origin(request_id: str, traceparent: str) -> dict[str, str]:
    """Whose chunk a line is about, for `extra`: a client's words, made printable, and W3C trace context's id.

    https://www.w3.org/TR/trace-context/#traceparent-header: version-traceid-parentid-flags.
    """
    parts = traceparent.split("-")
    trace_id = parts[1] if len(parts) >= 4 and len(parts[1]) == 32 else ""
    return {"request_id": _printable(request_id), "trace_id": _printable(trace_id)}


@contextlib.contextmanager
def logging_to(stream: TextIO, level: str, log_format: str) -> Iterator[None]:
    """Let every logger of the process write to `stream` while the context lasts, as "text" or "json"."""
    logging.raiseExceptions = False
    handler = LineWriter(stream)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    before = root.level
    root.setLevel(level.upper())
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
        handler.close()


class LineWriter(logging.Handler):
    """Formats where the line is logged, writes elsewhere; what cannot be written is lost."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(_WAITING_LINES)
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Hand the line over."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(self.format(record))

    def close(self) -> None:
        """Give the lines that wait a moment to be written."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
            self._thread.join(_LAST_LINES_SECONDS)
        super().close()

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            with contextlib.suppress(OSError, ValueError):  # full, broken, closed
                self._stream.write(line + "\n")
                self._stream.flush()


class TextFormatter(logging.Formatter):
    """Time, level, logger, message; behind it the chunk's origin, where there is one."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s%(origin)s")

    def format(self, record: logging.LogRecord) -> str:
        """One line, or several with a traceback."""
        record.origin = "".join(f" {name}={value}" for name, value in _origin_of(record))
        return super().format(record)


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, message; origin and traceback where there are any."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **dict(_origin_of(record)),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _origin_of(record: logging.LogRecord) -> Iterator[tuple[str, str]]:
    for name in _ORIGIN:
        if value := getattr(record, name, ""):
            yield name, value


def _printable(text: str) -> str:
    """ASCII without control characters or spaces: nobody's id ends a line or looks like another field."""
    short = text[:_LONGEST_ID]
    return "".join(c if "!" <= c <= "~" else f"\\u{ord(c):04x}" for c in short)
