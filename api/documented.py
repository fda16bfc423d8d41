"""How a route is described in the OpenAPI document: `@router.post("", **documented("Submit a task", …))`.

Routes read their bodies themselves, because limits apply before anything is parsed, so FastAPI cannot infer them. A
route states its summary, its body and its answers here; `api/openapi.py` adds its scopes and the errors that all routes
share. `tests/api/test_openapi.py` fails if a route says less than that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel
from starlette.responses import Response

from api.json_responses import JsonResponse
from api.shapes import ErrorBody

JSON: Final = "application/json"
SCHEMAS: Final = "#/components/schemas/"
ERRORS: Final = {
    400: "The request is not valid; `error.code` says what is wrong.",
    401: "There is no token, or it is unknown, revoked or expired.",
    403: "The token lacks the scope of the route, or may not submit this type.",
    404: "It does not exist, or the token may not see it.",
    408: "The request did not arrive in time.",
    409: "It conflicts with what is stored.",
    413: "The body, or what is to be stored of it, is too large.",
    429: "Too much is waiting; `Retry-After` says when to try again.",
    500: "An unexpected error; the log of the API has the details.",
    503: "A server that is needed does not answer; `Retry-After` says when to try again.",
}
EVENTS: Final = "text/event-stream"
EVENT: Final = {"type": "object", "properties": {name: {"type": "string"} for name in ("data", "event", "id")}}
TEXT: Final = {"type": "string"}
WITH_BODY: Final = (400, 408, 413)


@dataclass(frozen=True, slots=True)
class Body:
    """A request body: a pydantic model or a JSON schema, and examples by the names that the page shows."""

    shape: type[BaseModel] | Mapping[str, Any]
    examples: Mapping[str, Any]
    media_type: str = JSON
    is_required: bool = True

    def described(self) -> dict[str, Any]:
        """Return the body. Its definitions are beside the schema; `api/openapi.py` moves them to the components."""
        schema = dict(self.shape) if isinstance(self.shape, Mapping) else _reference(self.shape)
        examples = {name: {"value": value} for name, value in self.examples.items()}
        return {"required": self.is_required, "content": {self.media_type: {"schema": schema, "examples": examples}}}


@dataclass(frozen=True, slots=True)
class Answer:
    """A successful answer: what it means, and the type that its JSON has; or the media types of one without JSON."""

    meaning: str
    shape: Any = None
    also: Sequence[str] = ()  # other media types

    def described(self) -> dict[str, Any]:
        content = {media_type: {"schema": EVENT if media_type == EVENTS else TEXT} for media_type in self.also}
        return {"description": self.meaning, "model": self.shape, "content": content}


@dataclass(frozen=True, slots=True)
class Header:
    """A request header that the route reads itself."""

    name: str
    meaning: str
    example: str

    def described(self) -> dict[str, Any]:
        schema = {"type": "string", "examples": [self.example]}
        return {"name": self.name, "in": "header", "required": False, "description": self.meaning, "schema": schema}


def documented(
    summary: str,
    *,
    answers: Mapping[int, Answer],
    body: Body | None = None,
    headers: Sequence[Header] = (),
    errors: Sequence[int] = (),
    tags: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the arguments of a route decorator. `errors` are statuses of this route beside those that all have.

    A router states the tag of its routes itself.
    """
    statuses = (*errors, *(WITH_BODY if body else ()))
    extra: dict[str, Any] = {"parameters": [each.described() for each in headers]} if headers else {}
    return {
        "summary": summary,
        "tags": list(tags),
        "status_code": min(answers),
        "response_class": JsonResponse if any(each.shape for each in answers.values()) else Response,
        "responses": {status: answer.described() for status, answer in answers.items()}
        | {status: {"description": ERRORS[status], "model": ErrorBody} for status in sorted(set(statuses))},
        "openapi_extra": extra | ({"requestBody": body.described()} if body else {}),
    }


def _reference(shape: type[BaseModel]) -> dict[str, Any]:
    schema = shape.model_json_schema(ref_template=f"{SCHEMAS}{{model}}")
    name, definitions = shape.__name__, schema.pop("$defs", {})
    return {"$ref": SCHEMAS + name, "$defs": {**definitions, name: schema}}
