"""A token submits only the types that it was given: by its list, or by the scope of a built-in type."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from api.tokens import SCOPE_OF_TYPE, Scope, Token
from tests.api.callers import FLAKY, Callers, expect_error
from tests.tasks import work
from tests.workflows.flows import FLOW

PAYLOADS: dict[str, Any] = {
    "workflow.execute": FLOW,
    "document.ingest": {"documentId": str(uuid.UUID(int=1)), "revision": 1},
    "http.request": {"destination": "crm"},
}


@pytest.mark.parametrize("type_", SCOPE_OF_TYPE)
def test_the_scope_to_submit_tasks_does_not_cover_built_in_types_that_reach_further(
    callers: Callers, type_: str
) -> None:
    scope = SCOPE_OF_TYPE[type_]
    everything_else = callers(*(each for each in Scope if each != scope))
    for given in (everything_else, callers(Scope.TASKS_SUBMIT, types=["*"])):
        answer = given.post("/api/tasks", json={"type": type_, "payload": PAYLOADS[type_]})
        assert scope in expect_error(answer, 403, "forbidden")
    assert work.rows() == []


def test_a_built_in_type_needs_its_own_scope_and_no_pattern(callers: Callers) -> None:
    both = callers(Scope.TASKS_SUBMIT, Scope.HTTP_REQUEST, types=["invoice.*"])
    assert both.post("/api/tasks", json={"type": "http.request", "payload": {"destination": "crm"}}).status_code == 202
    own = callers(Scope.HTTP_REQUEST)
    assert "tasks:submit" in expect_error(own.post("/api/tasks", json={"type": "http.request"}), 403, "forbidden")


def test_every_shipped_type_that_is_not_a_demo_has_a_scope() -> None:
    from tasks.core.registry import SHIPPED, handlers

    shipped = {type_ for type_, each in handlers().items() if each.function.__module__ in SHIPPED}
    assert {type_ for type_ in shipped if not type_.startswith("demo.")} == set(SCOPE_OF_TYPE)


def test_a_token_with_a_list_submits_only_the_types_that_a_pattern_matches(callers: Callers) -> None:
    caller = callers(Scope.TASKS_SUBMIT, types=["invoice.*", "demo.fl?ky"])
    assert caller.submit().status_code == 202
    message = expect_error(caller.post("/api/tasks", json={"type": "demo.sleep"}), 403, "forbidden")
    assert "demo.fl?ky, invoice.*" in message
    others = callers(Scope.TASKS_SUBMIT, types=["invoice.*"])
    expect_error(others.submit(), 403, "forbidden")
    assert work.rows("type") == [(FLAKY,)]


def test_a_pattern_is_compared_with_the_whole_type_and_its_case() -> None:
    token = Token("ci", frozenset({Scope.TASKS_SUBMIT}), ("invoice.*",))
    token.require_type("invoice.import")
    for other in ("Invoice.import", "my.invoice.import", "invoice", "", "x\ninvoice.import"):
        with pytest.raises(Exception, match="may submit only these types"):
            token.require_type(other)
