"""Responses of the API: JSON with camelCase names, times in UTC, and one shape for errors.

{"error": {"code": "unknown_task", "message": "There is no task …"}}
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from fastapi import responses
from pydantic.alias_generators import to_camel

MESSAGE_LIMIT: Final = 1000  # characters: a message may repeat what the client sent


class JsonResponse(responses.JSONResponse):
    """A JSON response that can hold the ledger's values: times, durations (as seconds) and ids."""

    def render(self, content: Any) -> bytes:
        return to_json(content).encode()


def to_json(content: Any) -> str:
    """Return the content as JSON on one line."""
    return json.dumps(content, default=_encode, ensure_ascii=False, separators=(",", ":"))


def error_response(
    status: int, code: str, message: str, *, headers: Mapping[str, str] | None = None, **details: object
) -> JsonResponse:
    if len(message) > MESSAGE_LIMIT:
        message = f"{message[:MESSAGE_LIMIT]}…."
    return JsonResponse({"error": {"code": code, "message": message, **details}}, status, headers)


def camel(value: Any) -> dict[str, Any]:
    """Return a dataclass as a JSON object with camelCase names."""
    return {to_camel(field.name): getattr(value, field.name) for field in dataclasses.fields(value)}


def _encode(value: Any) -> Any:
    match value:
        case datetime():
            return value.astimezone(UTC).isoformat()
        case timedelta():
            return value.total_seconds()
    return str(value)
