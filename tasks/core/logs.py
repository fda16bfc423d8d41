"""Configure the log lines of workers and beat: LOG_FORMAT=text for people, json for programs."""

from __future__ import annotations

import logging
from typing import Final

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

import settings

TEXT: Final = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
JSON: Final = JsonFormatter(
    ["levelname", "name", "message", "process"],
    timestamp="time",
    rename_fields={"levelname": "level", "name": "logger", "exc_info": "error"},
    reserved_attrs=[*RESERVED_ATTRS, "data"],  # Celery puts the arguments and results of its tasks there
    json_ensure_ascii=False,
)


def configure_logging(level: int | str) -> None:
    """Write all log records to stderr with one handler on the root logger."""
    handler = logging.StreamHandler()
    handler.setFormatter(JSON if settings.current().log_format == "json" else TEXT)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper() if isinstance(level, str) else level)
    logging.captureWarnings(True)
