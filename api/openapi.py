"""The OpenAPI 3.1 document of the application: what FastAPI infers, what each route says (`documented.py`), its scopes.

A token is one `bearer` requirement per scope that opens the route, because any one of them suffices.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute, iter_route_contexts

from api.authorization import scopes_of
from api.documented import ERRORS, JSON, SCHEMAS
from api.shapes import ErrorBody
from api.tokens import Scope

VERSION: Final = "1"  # of the routes under /api: a change that breaks clients raises it
SUMMARY: Final = "Celery tasks whose effects happen once, with a receipt."
DESCRIPTION: Final = """\
Send a token in the header `Authorization: Bearer TOKEN`; `manage.py token create NAME --scope …` makes one. Every error
has the same shape, `{"error": {"code", "message"}}`. docs/api.md explains tokens, keys, limits and errors. The chat,
`WS /ws/chat`, is described in docs/receipts.md: OpenAPI has no words for WebSockets.
"""
FASTAPI_ERROR: Final = "422"  # FastAPI documents its own answer to wrong parameters; ours is 400
FASTAPI_SCHEMAS: Final = ("HTTPValidationError", "ValidationError")
BEARER: Final = "bearer"
OF_ALL: Final = (500,)
WITH_TOKEN: Final = (401, 403, 503)


def operation_id(route: APIRoute) -> str:
    """Return the name that generated clients use: `tasks_read_transitions`."""
    return "_".join([*map(str, route.tags[:1]), route.name])


class DocumentedApi(FastAPI):
    """A FastAPI application whose document is complete."""

    def openapi(self) -> dict[str, Any]:
        return self._document

    @cached_property
    def _document(self) -> dict[str, Any]:
        document: dict[str, Any] = get_openapi(
            title=self.title, version=VERSION, summary=SUMMARY, description=DESCRIPTION, routes=self.routes
        )
        schemas: dict[str, Any] = document["components"]["schemas"]
        for name in FASTAPI_SCHEMAS:
            schemas.pop(name, None)
        schemas.setdefault(ErrorBody.__name__, ErrorBody.model_json_schema(ref_template=f"{SCHEMAS}{{model}}"))
        for context in iter_route_contexts(self.routes):
            for method in context.methods or ():
                operation = document["paths"].get(context.path_format, {}).get(method.lower())
                if operation is not None and isinstance(context.original_route, APIRoute):
                    _complete(operation, scopes_of(context.original_route))
                    _move_definitions(operation, schemas)
        document["components"]["securitySchemes"] = {
            BEARER: {"type": "http", "scheme": "bearer", "description": f"A token. Scopes: {', '.join(Scope)}."}
        }
        return document


def _complete(operation: dict[str, Any], scopes: tuple[Scope, ...]) -> None:
    """Add what follows from the scopes and the parameters of a route."""
    answers = operation["responses"]
    statuses = [*OF_ALL, *(WITH_TOKEN if scopes else ())]
    if answers.pop(FASTAPI_ERROR, None):
        statuses.append(400)
    if scopes:
        operation["security"] = [{BEARER: [scope]} for scope in scopes]
    for status in statuses:
        answers.setdefault(str(status), _error(status))
    operation["responses"] = dict(sorted(answers.items()))


def _error(status: int) -> dict[str, Any]:
    return {
        "description": ERRORS[status],
        "content": {JSON: {"schema": {"$ref": SCHEMAS + ErrorBody.__name__}}},
    }


def _move_definitions(operation: dict[str, Any], schemas: dict[str, Any]) -> None:
    """Move the definitions inside the schema of a request body to those of the whole document."""
    for content in operation.get("requestBody", {}).get("content", {}).values():
        for name, definition in content["schema"].pop("$defs", {}).items():
            if schemas.setdefault(name, definition) != definition:
                raise RuntimeError(f"Two schemas of the API are named {name}; rename one of the models.")
