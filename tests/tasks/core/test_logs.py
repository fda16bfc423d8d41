"""JSON log lines have fixed field names, and nothing of a task's arguments."""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime
from typing import Any

from tasks.core.logs import JSON


def test_a_json_line_has_the_documented_fields() -> None:
    logger = logging.Logger("shop.handlers")
    record = logger.makeRecord(logger.name, logging.INFO, __file__, 1, "imported %d für %s", (3, "Ada"), None)
    line = _read(record)
    assert datetime.fromisoformat(line.pop("time")).tzinfo == UTC
    assert line == {"level": "INFO", "logger": "shop.handlers", "message": "imported 3 für Ada", "process": os.getpid()}
    assert "für" in JSON.format(record)


def test_an_exception_is_one_line_with_its_traceback_in_the_field_error() -> None:
    try:
        raise ZeroDivisionError("no\nway")
    except ZeroDivisionError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.Logger("x").makeRecord("x", logging.ERROR, __file__, 1, "failed", (), info)
    assert "\n" not in JSON.format(record)
    assert _read(record)["error"].endswith("ZeroDivisionError: no\nway")


def test_celerys_copy_of_task_arguments_is_not_logged_but_a_handlers_extra_fields_are() -> None:
    extra = {"data": {"args": ["secret"]}, "order": 17}
    record = logging.Logger("x").makeRecord("x", logging.INFO, __file__, 1, "done", (), None, extra=extra)
    assert _read(record)["order"] == 17
    assert "secret" not in JSON.format(record)


def _read(record: logging.LogRecord) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(JSON.format(record))
    return line
