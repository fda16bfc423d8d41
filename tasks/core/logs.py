"""Configure the log lines of our programs: LOG_FORMAT=text for people, json for programs.

A line that states a fact has the field `event` (docs/logs.md lists all of them). A line that is written while a
handler runs has the fields `taskId`, `type` and `traceId` of its task, also if the handler's own code or a library
writes it. A line about an HTTP request has the `traceId` of its header `traceparent`.

The records of failed attempts have the handler's exception, for tools such as Sentry. Its text may contain parts of the
payload, so our lines leave it out.
"""

from __future__ import annotations

import copy
import logging
import sys
from pathlib import Path
from typing import Final

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

import settings
import tracing

OUTCOMES: Final = "tasks.outcomes"  # the logger of what became of tasks
UVICORN: Final = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")


class TextFormatter(logging.Formatter):
    """One line for people; the task is at its end."""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(_without_handlers_error(record))

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        if task_id := getattr(record, "taskId", None):
            line += f" [task {task_id} {getattr(record, 'type', '')} trace {getattr(record, 'traceId', '')}]"
        return line


class JsonLines(JsonFormatter):
    """One JSON object per line, for programs."""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(_without_handlers_error(record))


def _without_handlers_error(record: logging.LogRecord) -> logging.LogRecord:
    """Return the record of a failed attempt without its exception, and any other record as it is."""
    if record.name != OUTCOMES or not record.exc_info:
        return record
    copied = copy.copy(record)  # other log handlers get the record, too
    copied.exc_info = copied.exc_text = None
    return copied


class TaskFields(logging.Filter):
    """Adds the task whose handler is running to every record. It lets all records pass."""

    def filter(self, record: logging.LogRecord) -> bool:
        task = tracing.running_task()
        if task is not None and not hasattr(record, "taskId"):
            record.taskId, record.type, record.traceId = str(task.id), task.type, task.trace_id
        elif not hasattr(record, "traceId") and (traceparent := tracing.joined_traceparent()):
            record.traceId = traceparent[3:35]
        return True


TEXT: Final = TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
JSON: Final = JsonLines(
    ["levelname", "name", "message", "process"],
    timestamp="time",
    rename_fields={"levelname": "level", "name": "logger", "exc_info": "error"},
    reserved_attrs=[*RESERVED_ATTRS, "data", "color_message"],  # of Celery: arguments and results; of uvicorn: colours
    json_ensure_ascii=False,
)


def configure_logging(level: int | str) -> None:
    """Write all log records to stderr with one handler on the root logger."""
    handler = logging.StreamHandler()
    handler.setFormatter(JSON if settings.current().log_format == "json" else TEXT)
    handler.addFilter(TaskFields())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper() if isinstance(level, str) else level)
    logging.captureWarnings(True)


def configure_uvicorn_logging() -> None:
    """Let the records of uvicorn, of its access log and of our own code take the same way, with uvicorn's level.

    Only inside the `uvicorn` program, which has configured its own loggers before it imports the application.
    """
    path = Path(sys.argv[0])
    if path.name != "uvicorn" and path.parts[-2:] != ("uvicorn", "__main__.py"):
        return
    try:
        configure_logging(logging.getLogger("uvicorn.error").getEffectiveLevel())
    except settings.SettingsError:
        return  # the start of the application reports it
    for name in UVICORN:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
