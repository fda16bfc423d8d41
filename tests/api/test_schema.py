"""schemathesis sends requests that the OpenAPI document allows, and some that it forbids, to a running server.

It is bounded: a few requests per route, the same ones in every run. No answer is a 5xx, and every answer has a status,
a content type and a shape that the document names.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from api.app import app
from tests.api.callers import Callers, make_token
from tests.api.objects import document_of, make, name_what_examples_name, names_in
from tests.api.routes import DOCUMENTED, operation_of, valid_request
from tests.api.server import Server

REQUESTS: Final = 3  # per route and mode
CHECKS: Final = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)


@pytest.fixture(scope="module")
def schema() -> Any:
    return schemathesis.openapi.from_dict(app.openapi())


def test_requests_that_the_document_allows_get_answers_that_it_names(schema: Any, server: Server) -> None:
    _send_to_all(schema, server, GenerationMode.POSITIVE)


def test_requests_that_the_document_forbids_get_answers_that_it_names(schema: Any, server: Server) -> None:
    _send_to_all(schema, server, GenerationMode.NEGATIVE)


def test_the_answers_to_examples_about_real_objects_have_the_shapes_of_the_document(
    schema: Any, server: Server, callers: Callers, monkeypatch: pytest.MonkeyPatch
) -> None:
    name_what_examples_name(monkeypatch)
    caller = callers()
    document_of(caller)
    for method, path, _ in DOCUMENTED:
        objects = {name: make(name, path)(caller) for name in names_in(path)}
        request = valid_request(method, path).options
        given = {"path_parameters": objects or None, "query": request.get("params")}
        if "json" in request:
            given["body"] = request["json"]
        statuses = send(schema[path][method], GenerationMode.POSITIVE, server, caller.token, requests=1, **given)
        assert all(status < 300 or status == 409 for status in statuses), f"{method} {path}: {statuses}"


def _send_to_all(schema: Any, server: Server, mode: GenerationMode) -> None:
    token, statuses = make_token("schemathesis"), Counter[int]()
    for method, path, _ in DOCUMENTED:
        if mode is GenerationMode.POSITIVE or operation_of(method, path).keys() & {"parameters", "requestBody"}:
            statuses.update(send(schema[path][method], mode, server, token))
    assert {200, 202, 400, 404} <= statuses.keys() if mode is GenerationMode.POSITIVE else {400, 404} <= statuses.keys()


def send(
    operation: Any, mode: GenerationMode, server: Server, token: str, *, requests: int = REQUESTS, **given_: Any
) -> list[int]:
    """Send requests to one route and check the answers; return their statuses."""
    statuses: list[int] = []

    @seed(9)
    @settings(
        max_examples=requests,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode, **given_))
    def run(case: Any) -> None:
        if case.query and "wait" in case.query:
            case.query["wait"] = 0  # nothing runs the task for which it would wait
        case.headers = {**(case.headers or {}), "Authorization": f"Bearer {token}"}
        answer = case.call(base_url=f"http://127.0.0.1:{server.port}", timeout=10)
        statuses.append(answer.status_code)
        case.validate_response(answer, checks=list(CHECKS))

    run()
    return statuses
