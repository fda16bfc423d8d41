"""The routes of the application, and a valid request for each, made of the examples in the OpenAPI document."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fastapi.routing import APIRoute, iter_route_contexts

from api.app import app
from api.authorization import OPEN_PATHS

ROUTES: list[tuple[str, str, APIRoute]] = [
    (method, context.path or "", context.original_route)
    for context in iter_route_contexts(app.routes)
    if isinstance(context.original_route, APIRoute)
    for method in sorted(context.original_route.methods or ())
]
PROTECTED = [route for route in ROUTES if route[1] not in OPEN_PATHS]
DOCUMENTED = [route for route in ROUTES if route[2].include_in_schema]


@dataclass
class ValidRequest:
    """The arguments of a test client for one route, without the values of its path."""

    method: str
    path: str
    options: dict[str, Any] = field(default_factory=dict)


def operation_of(method: str, path: str) -> dict[str, Any]:
    operation: dict[str, Any] = app.openapi()["paths"][path][method.lower()]
    return operation


def valid_request(method: str, path: str) -> ValidRequest:
    """Return the request of the first example, with every parameter that the route requires."""
    operation = operation_of(method, path)
    options: dict[str, Any] = {}
    query = {each["name"]: each for each in operation.get("parameters", ()) if each["in"] == "query"}
    for name, parameter in query.items():
        if parameter["required"]:
            assert "examples" in parameter["schema"], f"{method} {path}: give the parameter {name} an example"
            options.setdefault("params", {})[name] = parameter["schema"]["examples"][0]
    if body := operation.get("requestBody"):
        ((media_type, content),) = body["content"].items()
        example = next(iter(content["examples"].values()))["value"]
        if media_type == "multipart/form-data":
            options["files"] = {name: (f"{name}.txt", text) for name, text in example.items()}
        else:
            options["json"] = example
    return ValidRequest(method, path, options)
