"""Operators over HTTP: counts by status, dead tasks by filter, and bulk changes that are bounded and recorded."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest

from api import internal_tasks
from api.tokens import Scope
from models.engine import engine
from tasks.execution.deliver import deliver
from tests.api.callers import FLAKY, Caller, Callers, expect_error
from tests.outbox.ledger import move
from tests.servers import ServersOfTests
from tests.tasks.command_line import DIES, buried, dead, submitted
from tests.tasks.work import rows, transitions

SUSPENDED = "/internal/tasks/suspended"


@pytest.fixture
def operator(callers: Callers) -> Caller:
    return callers(Scope.OPERATE, name="ops")


def statuses() -> Counter[str]:
    return Counter(status for (status,) in rows("status"))


def change(operator: Caller, action: str, **body: Any) -> Any:
    answer = operator.post(f"{SUSPENDED}/{action}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_counts_have_both_names_of_each_status_and_the_latest_tasks(operator: Caller) -> None:
    (died,) = dead()
    (retried,) = submitted({"fail": 1})
    deliver(engine(), [retried])
    (_, waits) = submitted(1, 2)
    found = operator.get("/internal/tasks/stats").json()
    words = ("pending", "processing", "retry", "completed", "suspended")
    assert [found[word] for word in words] == [2, 0, 1, 0, 1]
    assert {each["status"]: each["count"] for each in found["statuses"]}["QUEUED"] == 2
    assert found["dead"] == [{"type": FLAKY, "errorCode": "permanent", "count": 1}]
    (kind,) = found["kinds"]
    assert (kind["queue"], kind["type"], kind["counts"]["DEAD"]) == ("ingest", FLAKY, 1)
    assert isinstance(kind["oldestDue"], float)
    assert found["latest"][-1]["taskId"] == str(died)
    assert {str(retried), str(waits)} < {each["taskId"] for each in found["latest"]}


def test_dead_tasks_are_listed_by_filter_and_page(operator: Caller, stack: ServersOfTests) -> None:
    submitted(1)
    old = {str(id_) for id_ in buried(3, error_code="timeout")}
    move(stack, 3600)
    new = {str(id_) for id_ in buried(2, type="another.type", queue="slow")}
    (shown,) = operator.get(SUSPENDED, params={"limit": 1}).json()["tasks"]
    assert shown["taskId"] in new
    at = shown["finishedAt"]
    for parameters, expected in (
        ({}, old | new),
        ({"errorCode": "timeout"}, old),
        ({"type": "another.type"}, new),
        ({"queue": "slow", "errorCode": "timeout"}, set()),
        ({"before": at}, old),
        ({"after": at}, new),
    ):
        found = operator.get(SUSPENDED, params=parameters).json()
        assert {each["taskId"] for each in found["tasks"]} == expected
    first = operator.get(SUSPENDED, params={"limit": 3}).json()
    rest = operator.get(SUSPENDED, params={"limit": 3, "cursor": first["nextCursor"]}).json()
    assert {each["taskId"] for each in first["tasks"] + rest["tasks"]} == old | new
    assert rest["nextCursor"] is None
    expect_error(operator.get(SUSPENDED, params={"cursor": "x"}), 400, "misuse")


def test_a_dry_run_counts_by_error_and_changes_nothing(operator: Caller) -> None:
    buried(3, error_code="timeout")
    buried(2)
    for action in ("requeue", "discard"):
        found = change(operator, action, filter={"errorCode": "timeout"}, dryRun=True)
        assert (found["matched"], found["changed"], found["left"], found["dryRun"]) == (3, 0, 3, True)
        assert [(each["errorCode"], each["count"]) for each in found["groups"]] == [("timeout", 3)]
    assert statuses() == {"DEAD": 5}


def test_requeued_tasks_run_again_and_the_reason_is_in_their_history(operator: Caller) -> None:
    first, second = dead(DIES, DIES)
    done = change(operator, "requeue", filter={"ids": [str(first)]}, reason="the address was repaired")
    assert (done["matched"], done["changed"], done["left"]) == (1, 1, 0)
    assert transitions(first, "to_status, message, actor")[-1] == ("QUEUED", "the address was repaired", "api:ops")
    assert dict(rows("id, status")) == {first: "QUEUED", second: "DEAD"}
    change(operator, "discard", filter={"type": FLAKY}, reason="too old")
    assert dict(rows("id, status")) == {first: "QUEUED", second: "DISCARDED"}


def test_a_request_changes_no_more_than_its_limit_and_says_how_many_are_left(operator: Caller) -> None:
    buried(7)
    done = change(operator, "discard", filter={"type": FLAKY}, limit=3)
    assert (done["matched"], done["changed"], done["left"]) == (7, 3, 4)
    assert statuses() == {"DISCARDED": 3, "DEAD": 4}
    assert change(operator, "discard", filter={"type": FLAKY})["left"] == 0


def test_a_slow_rate_ends_with_its_time_and_says_how_many_are_left(
    operator: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(internal_tasks, "BULK_SECONDS", 0.1)
    buried(20)
    done = change(operator, "requeue", filter={"type": FLAKY}, rate=2)
    assert (done["matched"], done["changed"], done["left"]) == (20, 1, 19)
    done = change(operator, "requeue", filter={"type": FLAKY}, rate=1e9)
    assert (done["changed"], done["left"]) == (19, 0)


def test_all_dead_tasks_are_changed_only_if_the_request_says_so(operator: Caller) -> None:
    buried(2)
    empty: list[dict[str, Any]] = [{}, {"filter": {}}, {"all": False}]
    for body in empty:
        expect_error(operator.post(f"{SUSPENDED}/requeue", json=body), 400, "misuse")
    assert change(operator, "requeue", all=True)["changed"] == 2


def test_invalid_bulk_requests_change_nothing(operator: Caller) -> None:
    buried(2)
    invalid: list[dict[str, Any]] = [
        {"filter": {"tpye": FLAKY}},
        {"filter": {"type": FLAKY}, "limit": 0},
        {"filter": {"type": FLAKY}, "limit": 10_001},
        {"filter": {"type": FLAKY}, "rate": 0},
        {"filter": {"type": FLAKY}, "rate": "fast"},
        {"filter": {"type": FLAKY}, "reason": "a\0b"},
        {"filter": {"type": "a\ud800"}},
        {"filter": {"ids": []}},
        {"filter": {"ids": ["17"]}},
        {"filter": {"ids": [str(uuid.uuid4())] * 1001}},
        {"filter": {"before": "2026-11-18T10:00:00"}},
    ]
    for body in invalid:
        for action in ("requeue", "discard"):
            expect_error(operator.post(f"{SUSPENDED}/{action}", content=json.dumps(body)), 400, "misuse")
    expect_error(operator.post(f"{SUSPENDED}/discard", json={"all": True, "resetSteps": True}), 400, "misuse")
    assert statuses() == {"DEAD": 2}


def test_filters_by_the_time_of_death_choose_what_died_between(operator: Caller, stack: ServersOfTests) -> None:
    buried(1)
    move(stack, 3600)
    (newer,) = buried(1)
    ((died_at,),) = rows("finished_at", "id = :id", id=newer)
    after = (died_at - timedelta(minutes=1)).isoformat()
    assert change(operator, "discard", filter={"after": after})["changed"] == 1
    assert change(operator, "discard", filter={"before": after})["changed"] == 1


def test_only_operators_may_use_these_routes(callers: Callers) -> None:
    others = callers(*(scope for scope in Scope if scope is not Scope.OPERATE))
    buried(1)
    for method, path in (("GET", "/internal/tasks/stats"), ("GET", SUSPENDED), ("POST", f"{SUSPENDED}/discard")):
        expect_error(others.request(method, path), 403, "forbidden")
    assert statuses() == {"DEAD": 1}
