"""Lists of tasks over HTTP: a principal sees its own tasks, page by page, and nothing is missing or doubled."""

from __future__ import annotations

import base64
from datetime import datetime
from typing import Any

import pytest

from api.tokens import Scope
from models.engine import engine, sessions
from models.sql import sql
from models.status import TaskStatus
from tasks import submit
from tasks.execution.deliver import deliver
from tasks.operations import listing
from tasks.operations.listing import TaskFilter
from tests.api.callers import FLAKY, Caller, Callers, expect_error
from tests.tasks.command_line import DIES, buried, change, manage
from tests.tasks.deliveries import claimed

TASKS = "/api/tasks"


@pytest.fixture
def caller(callers: Callers) -> Caller:
    return callers(Scope.TASKS_SUBMIT, Scope.TASKS_READ, name="ci")


def ids_of(answer: Any) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [each["taskId"] for each in answer.json()["tasks"]]


def all_pages(caller: Caller, **parameters: Any) -> list[str]:
    """Return the ids of all pages, in their order."""
    found, cursor = [], None
    while True:
        page = caller.get(TASKS, params={**parameters, **({"cursor": cursor} if cursor else {})})
        found += ids_of(page)
        cursor = page.json()["nextCursor"]
        if cursor is None:
            return found


def ended(caller: Caller, payload: Any = None, **fields: Any) -> str:
    """Submit a task, run it, and return its id."""
    task_id: str = caller.submit(payload, **fields).json()["taskId"]
    deliver(engine(), [task_id])
    return task_id


def test_a_principal_lists_its_own_tasks_only_whatever_their_status(callers: Callers, caller: Caller) -> None:
    stranger = callers(Scope.TASKS_SUBMIT, Scope.TASKS_READ, name="stranger")
    theirs = [stranger.submit().json()["taskId"], ended(stranger), ended(stranger, DIES)]
    with sessions().begin() as session:
        internal = str(submit(session, FLAKY, context={"user": "ci"}).task_id)
    own = [ended(caller, DIES), ended(caller), ended(caller, {"fail": 1}), caller.submit().json()["taskId"]]
    assert ids_of(caller.get(TASKS)) == own[::-1]
    assert set(ids_of(stranger.get(TASKS))) == set(theirs)
    for scope in (Scope.TASKS_READ_ALL, Scope.OPERATE):
        assert set(ids_of(callers(scope).get(TASKS))) == {*own, *theirs, internal}
    assert ids_of(callers(Scope.TASKS_READ).get(TASKS)) == []


def test_a_running_task_is_in_the_list_of_its_principal(caller: Caller) -> None:
    running, waiting = (caller.submit().json()["taskId"] for _ in range(2))
    assert [str(each.id) for each in claimed([running]).tasks] == [running]
    assert ids_of(caller.get(TASKS, params={"status": "processing"})) == [running]
    assert set(ids_of(caller.get(TASKS))) == {running, waiting}


def test_filters_take_both_names_of_a_status_and_can_be_combined(caller: Caller) -> None:
    dead, done, retrying, queued = (
        ended(caller, DIES),
        ended(caller),
        ended(caller, {"fail": 1}),
        caller.submit().json()["taskId"],
    )
    for words, expected in (
        (["DEAD"], [dead]),
        (["suspended"], [dead]),
        (["Completed"], [done]),
        (["retry"], [retrying]),
        (["pending"], [queued]),
        (["pending", "DEAD", "queued"], [queued, dead]),
    ):
        assert ids_of(caller.get(TASKS, params={"status": words})) == expected
    assert ids_of(caller.get(TASKS, params={"type": FLAKY, "queue": "ingest", "status": "DEAD"})) == [dead]
    assert ids_of(caller.get(TASKS, params={"type": "another.type"})) == []
    at = datetime.fromisoformat(caller.get(f"{TASKS}/{done}").json()["finishedAt"])
    assert ids_of(caller.get(TASKS, params={"until": at.isoformat()})) == [dead]
    assert dead not in ids_of(caller.get(TASKS, params={"since": at.isoformat()}))


def test_manage_py_takes_both_names_of_a_status_too(caller: Caller) -> None:
    dead = ended(caller, DIES)
    for word in ("suspended", "dead", "DEAD"):
        assert [each["taskId"] for each in manage("tasks", "--status", word, "--json").json["tasks"]] == [dead]
    refused = manage("tasks", "--status", "lost")
    assert (refused.code, "There is no status 'lost'" in refused.err) == (2, True)


@pytest.mark.parametrize("is_operator", [False, True])
def test_pages_follow_each_other_without_a_gap_or_a_repetition(
    callers: Callers, caller: Caller, is_operator: bool
) -> None:
    """The DEAD tasks ended at the same moment, so only their ids order them."""
    dead = {str(id_) for id_ in buried(7, context='{"principal": "ci"}')}
    others = [ended(caller), caller.submit().json()["taskId"], ended(caller, {"fail": 1})]
    reader = callers(Scope.OPERATE) if is_operator else caller
    for limit in (1, 3, 5, 10, 200):
        found = all_pages(reader, limit=limit)
        assert len(found) == 10
        assert set(found) == dead | set(others)
    assert all_pages(reader, limit=2) == all_pages(reader)


def test_a_page_that_is_just_full_and_the_last_one_has_no_next_page(caller: Caller) -> None:
    for _ in range(2):
        caller.submit()
    assert caller.get(TASKS, params={"limit": 2}).json()["nextCursor"] is None
    assert caller.get(TASKS, params={"limit": 1}).json()["nextCursor"] is not None


def test_invalid_parameters_are_answered_with_a_sentence(caller: Caller) -> None:
    encoded = base64.urlsafe_b64encode(b"2026-13-01_x").decode()
    for cursor in ("yesterday", encoded, "%00", "é", "x" * 201, "=" * 7):
        assert "cursor" in expect_error(caller.get(TASKS, params={"cursor": cursor}), 400, "misuse")
    for name, value in [
        ("limit", "0"),
        ("limit", "201"),
        ("limit", "many"),
        ("status", "lost"),
        ("type", "a\0b"),
        ("type", "x" * 201),
        ("queue", ""),
        ("since", "yesterday"),
        ("until", "2026-11-16T10:30:00"),
    ]:
        assert f"`{name}" in expect_error(caller.get(TASKS, params={name: value}), 400, "misuse")


def test_a_list_shows_no_details_of_an_error_except_to_operators(callers: Callers, caller: Caller) -> None:
    ended(caller, DIES)
    (shown,) = caller.get(TASKS).json()["tasks"]
    assert (shown["errorCode"], shown["errorMessage"]) == ("permanent", "The task can never succeed.")
    assert not {"payload", "result", "lastError", "leaseToken"} & shown.keys()
    (shown,) = callers(Scope.OPERATE).get(TASKS).json()["tasks"]
    assert "it will never work" in shown["errorMessage"]


def test_the_tasks_of_a_principal_are_read_from_its_own_index(caller: Caller) -> None:
    """Otherwise a principal with few tasks would read those of all others."""
    ids = buried(2000, context='{"principal": "another"}')
    change(ids[500:], "status = 'SUCCEEDED', last_error = NULL, error_message = NULL")
    change(ids[:250], "status = 'QUEUED', finished_at = NULL")
    ended(caller)
    with engine().begin() as connection:
        connection.execute(sql("ANALYZE ledger.ingest_task"))
        for statuses in ([TaskStatus.SUCCEEDED], [TaskStatus.QUEUED], [TaskStatus.SUCCEEDED, TaskStatus.DEAD]):
            chosen = TaskFilter(statuses, principal="ci")
            statement, values = listing._query(chosen, None, None, 50, is_forward=False)
            plan = connection.execute(sql(f"EXPLAIN {statement.text}"), values).scalars()
            assert "ix_ingest_task_principal" in "".join(plan)
