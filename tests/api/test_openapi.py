"""The OpenAPI document is complete: every route has a summary, a body, its errors, and its scopes."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from pydantic import BaseModel
from starlette.requests import Request

from api.app import app
from api.authorization import OPEN_PATHS, scopes_of
from api.documented import Answer, Body, documented
from api.openapi import BEARER, DocumentedApi
from api.shapes import Status
from api.workflows import read_workflow
from tests.api.examples import examples
from tests.api.routes import DOCUMENTED, PROTECTED, ROUTES, operation_of, valid_request

DOCUMENT = app.openapi()


def test_the_document_is_served_without_a_token_and_is_openapi_3_1(client: TestClient) -> None:
    served = client.get("/openapi.json")
    assert served.headers["content-type"] == "application/json"
    assert served.json() == json.loads(json.dumps(DOCUMENT))
    assert served.json()["openapi"].startswith("3.1.")


def test_every_route_but_the_pages_is_in_the_document() -> None:
    shown = {(method.upper(), path) for path, found in DOCUMENT["paths"].items() for method in found}
    assert shown == {(method, path) for method, path, _ in DOCUMENTED} >= {(m, p) for m, p, _ in PROTECTED}
    assert {path for _, path, route in ROUTES if not route.include_in_schema} <= OPEN_PATHS


@pytest.mark.parametrize(
    ("method", "path", "route"), DOCUMENTED, ids=[f"{method} {path}" for method, path, _ in DOCUMENTED]
)
def test_a_route_is_fully_described(method: str, path: str, route: APIRoute) -> None:
    assert missing_from(operation_of(method, path), method, open_=path in OPEN_PATHS, route=route) == []


def missing_from(operation: dict[str, Any], method: str, *, open_: bool, route: APIRoute) -> list[str]:
    """Return what a description lacks, as advice to the author of the route."""
    answers: dict[str, Any] = operation["responses"]
    reads_body = method in ("POST", "PUT", "PATCH") and "request" in route.endpoint.__code__.co_varnames
    checks = {
        "a summary: documented(…)": operation["summary"] != route.name.replace("_", " ").title(),
        "a description: the docstring of the function": open_ or operation.get("description"),
        "a tag: APIRouter(tags=[…])": operation.get("tags"),
        "the shape of its answers": all(
            media.get("schema") for each in answers.values() for media in each.get("content", {}).values()
        )
        and all(each.get("content") for status, each in answers.items() if status != "204"),
        "a successful answer": any(status.startswith("2") for status in answers),
        "error answers": "500" in answers and (open_ or answers.keys() >= {"401", "403", "503"}),
        "400 for its parameters": "400" in answers or not any(each["in"] == "query" for each in parameters(operation)),
        "404 for its object": "404" in answers or not any(each["in"] == "path" for each in parameters(operation)),
        "a body: documented(body=Body(…))": not reads_body or "requestBody" in operation,
        "an example of its body": all(
            each["examples"] for each in operation.get("requestBody", {}).get("content", {}).values()
        ),
        "its scopes": operation.get("security", []) == [{BEARER: [scope]} for scope in scopes_of(route)]
        and bool(scopes_of(route)) != open_,
    }
    return [lacking for lacking, is_there in checks.items() if not is_there]


def parameters(operation: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = operation.get("parameters", [])
    return found


def test_a_route_without_a_description_is_noticed() -> None:
    careless = DocumentedApi()

    @careless.post("/api/secrets/{name}")
    async def make_secret(request: Request, name: str, length: int = 1) -> None: ...

    operation = careless.openapi()["paths"]["/api/secrets/{name}"]["post"]
    route = next(each for each in careless.routes if isinstance(each, APIRoute))
    found = " ".join(missing_from(operation, "POST", open_=False, route=route))
    for word in ("summary", "description", "tag", "shape", "error answers", "404", "body:", "scopes"):
        assert word in found
    assert "422" not in operation["responses"]


def test_two_bodies_of_the_same_name_are_refused() -> None:
    def body(field: str) -> type[BaseModel]:
        return type("Task", (BaseModel,), {"__annotations__": {field: str}})

    confused = DocumentedApi()
    for number, field in enumerate(("a", "b")):
        described = documented("Do it", body=Body(body(field), {}), answers={200: Answer("Done.", Status)})
        confused.post(f"/{number}", **described)(lambda: None)
    with pytest.raises(RuntimeError, match="Two schemas of the API are named Task"):
        confused.openapi()


def test_operations_have_different_names_and_every_reference_exists() -> None:
    names = Counter(operation_of(method, path)["operationId"] for method, path, _ in DOCUMENTED)
    assert max(names.values()) == 1
    references = set(_values(DOCUMENT, "$ref"))
    assert references == {f"#/components/schemas/{name}" for name in DOCUMENT["components"]["schemas"]}
    assert not list(_values(DOCUMENT, "$defs"))


def test_the_first_example_of_the_page_is_the_example_of_the_document() -> None:
    shown = next(each for each in examples() if each.body and each.path == "/api/tasks")
    assert json.loads(shown.body or "") == valid_request("POST", "/api/tasks").options["json"]


def _values(found: Any, key: str) -> Any:
    """Yield every value of a key, at any depth."""
    for name, value in found.items() if isinstance(found, dict) else enumerate(found):
        if name == key:
            yield value
        if isinstance(value, dict | list):
            yield from _values(value, key)


def test_a_workflow_may_have_the_context_notify_and_priority_of_its_task() -> None:
    body = DOCUMENT["paths"]["/api/workflows/apply"]["post"]["requestBody"]["content"]["application/json"]
    schema = DOCUMENT["components"]["schemas"][body["schema"]["$ref"].rpartition("/")[2]]
    assert schema["additionalProperties"] is False
    for example in body["examples"].values():
        assert example["value"].keys() <= schema["properties"].keys()
        read_workflow(json.dumps(example["value"]).encode())
    assert any({"context", "notify", "priority"} <= each["value"].keys() for each in body["examples"].values())
