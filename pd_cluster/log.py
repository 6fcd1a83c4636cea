"""Logs are events with fields: `log.info("kv_sent", request_id=r.id, num_bytes=n)`, one line each on stderr.

Lines are logfmt for people or JSON for collectors. A field whose value is None is left out.
"""

import json
import logging
import sys
from typing import Any, Literal, TextIO

_FIELDS = "pd_cluster_fields"


class EventLog:
    """A named source of events on top of the standard library's logging."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, **fields: Any) -> None:
        self._emit(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._emit(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._emit(logging.WARNING, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._emit(logging.ERROR, event, fields)

    def exception(self, event: str, **fields: Any) -> None:
        """An error with the traceback of the exception being handled."""
        self._emit(logging.ERROR, event, fields, exc_info=True)

    def _emit(self, level: int, event: str, fields: dict[str, Any], exc_info: bool = False) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={_FIELDS: fields}, exc_info=exc_info, stacklevel=3)


def get_log(name: str) -> EventLog:
    return EventLog(name)


def _logfmt_value(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return json.dumps(text, ensure_ascii=False) if not text or any(c in text for c in ' "=\n\t') else text


class EventFormatter(logging.Formatter):
    """`time level logger event key=value ...`, or one JSON object a line."""

    def __init__(self, style: Literal["logfmt", "json"], process: str = "") -> None:
        super().__init__()
        self._json = style == "json"
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {k: v for k, v in getattr(record, _FIELDS, {}).items() if v is not None}
        if self._process:
            fields = {"process": self._process} | fields
        when = self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}"
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        if self._json:
            line = {
                "time": when,
                "level": record.levelname.lower(),
                "logger": record.name,
                "event": record.getMessage(),
            }
            return json.dumps(line | fields | ({"traceback": trace} if trace else {}), default=str, ensure_ascii=False)
        pairs = "".join(f" {key}={_logfmt_value(value)}" for key, value in fields.items())
        text = f"{when} {record.levelname.lower():7} {record.name} {record.getMessage()}{pairs}"
        return f"{text}\n{trace}" if trace else text


def configure_logging(
    level: str = "info",
    style: Literal["logfmt", "json"] = "logfmt",
    process: str = "",
    stream: TextIO | None = None,
) -> None:
    """Send every event of this process to `stream` (stderr); `process` names it in each line."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(EventFormatter(style, process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("asyncio").setLevel(logging.WARNING)
