"""How the API answers: JSON in camelCase, times as text in UTC, errors in one shape.

{"error": {"code": "unknown_task", "message": "There is no task …"}}
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from fastapi.responses import JSONResponse
from pydantic.alias_generators import to_camel


class Answer(JSONResponse):
    """Knows the values of the ledger: times, ids."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, default=_plain, ensure_ascii=False, separators=(",", ":")).encode()


def refusal(
    status: int, code: str, message: str, *, headers: Mapping[str, str] | None = None, **details: object
) -> Answer:
    return Answer({"error": {"code": code, "message": message, **details}}, status, headers)


def camel(value: Any) -> dict[str, Any]:
    """A dataclass as this project's JSON spells it."""
    return {to_camel(field.name): getattr(value, field.name) for field in dataclasses.fields(value)}


def _plain(value: Any) -> Any:
    return value.astimezone(UTC).isoformat() if isinstance(value, datetime) else str(value)
