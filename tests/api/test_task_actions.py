"""Cancel and retry over HTTP: only one's own tasks, and only from a status in which that is safe."""

from __future__ import annotations

import uuid

import pytest

from api.tokens import Scope
from models.engine import engine
from tasks.execution.deliver import deliver
from tests.api.callers import Caller, Callers, expect_error
from tests.tasks.command_line import DIES
from tests.tasks.deliveries import claimed
from tests.tasks.work import task, transitions, wakeups

LATER = "2100-01-01T00:00:00Z"


@pytest.fixture
def caller(callers: Callers) -> Caller:
    return callers(Scope.TASKS_SUBMIT, name="ci")


def last_transition(task_id: str) -> tuple[object, ...]:
    return transitions(uuid.UUID(task_id), "from_status, to_status, message, actor")[-1]


def test_a_waiting_task_is_cancelled_and_never_runs(caller: Caller) -> None:
    queued = caller.submit().json()["taskId"]
    retrying = caller.submit({"fail": 1}).json()["taskId"]
    deliver(engine(), [retrying])
    answer = caller.post(f"/api/tasks/{queued}/cancel", json={"reason": "sent by mistake"})
    assert answer.json() == {"taskId": queued, "was": "QUEUED", "status": "DISCARDED"}
    assert last_transition(queued) == ("QUEUED", "DISCARDED", "sent by mistake", "api:ci")
    assert caller.post(f"/api/tasks/{retrying}/cancel").json()["was"] == "RETRYING"
    assert last_transition(retrying) == ("RETRYING", "DISCARDED", "cancelled", "api:ci")
    deliver(engine(), [queued, retrying])
    assert {task(uuid.UUID(id_))["status"] for id_ in (queued, retrying)} == {"DISCARDED"}


def test_a_running_task_is_not_cancelled(caller: Caller, callers: Callers) -> None:
    id_ = caller.submit().json()["taskId"]
    claimed([uuid.UUID(id_)])
    for each in (caller, callers(Scope.OPERATE)):
        assert "is running" in expect_error(each.post(f"/api/tasks/{id_}/cancel"), 409, "task_running")
        expect_error(each.post(f"/api/tasks/{id_}/retry"), 409, "not_waiting")
    assert task(uuid.UUID(id_))["status"] == "RUNNING"


def test_a_task_that_has_ended_is_not_cancelled(caller: Caller) -> None:
    done, dead = caller.submit().json()["taskId"], caller.submit(DIES).json()["taskId"]
    deliver(engine(), [done, dead])
    for id_, status in ((done, "SUCCEEDED"), (dead, "DEAD")):
        assert status in expect_error(caller.post(f"/api/tasks/{id_}/cancel"), 409, "already_done")
        assert task(uuid.UUID(id_))["status"] == status


def test_a_cancelled_task_frees_its_partition_key(caller: Caller) -> None:
    first, second = (caller.submit(partitionKey="k").json()["taskId"] for _ in range(2))
    before = len(wakeups())
    assert caller.post(f"/api/tasks/{first}/cancel").status_code == 200
    assert [str(id_) for wakeup in wakeups()[before:] for id_ in wakeup.ids] == [second]


def test_a_task_that_waits_for_its_time_or_is_dead_runs_now(caller: Caller) -> None:
    later, dead = caller.submit(runAt=LATER).json()["taskId"], caller.submit(DIES).json()["taskId"]
    deliver(engine(), [later, dead])
    answers = [caller.post(f"/api/tasks/{id_}/retry", json={"reason": "repaired"}).json() for id_ in (later, dead)]
    assert [(each["was"], each["status"]) for each in answers] == [("QUEUED", "QUEUED"), ("DEAD", "QUEUED")]
    assert last_transition(dead) == ("DEAD", "QUEUED", "repaired", "api:ci")
    deliver(engine(), [later])
    assert task(uuid.UUID(later))["status"] == "SUCCEEDED"
    expect_error(caller.post(f"/api/tasks/{later}/retry"), 409, "not_waiting")


@pytest.mark.parametrize("action", ["cancel", "retry"])
def test_only_operators_change_the_tasks_of_others(caller: Caller, callers: Callers, action: str) -> None:
    id_ = caller.submit(runAt=LATER).json()["taskId"]
    stranger = callers(Scope.TASKS_SUBMIT, Scope.TASKS_READ_ALL)
    expect_error(stranger.post(f"/api/tasks/{id_}/{action}"), 404, "unknown_task")
    expect_error(stranger.post(f"/api/tasks/{uuid.uuid4()}/{action}"), 404, "unknown_task")
    expect_error(stranger.post(f"/api/tasks/no-id/{action}"), 404, "unknown_task")
    assert task(uuid.UUID(id_))["next_retry_at"] is not None
    assert callers(Scope.OPERATE).post(f"/api/tasks/{id_}/{action}").status_code == 200


def test_an_invalid_body_changes_nothing(caller: Caller) -> None:
    id_ = caller.submit(runAt=LATER).json()["taskId"]
    for body in (b"[]", b'{"reason": ""}', b'{"reason": "a\\u0000"}', b'{"reason": "\\ud800"}', b'{"raeson": "x"}'):
        expect_error(caller.post(f"/api/tasks/{id_}/cancel", content=body), 400, "misuse")
    expect_error(caller.post(f"/api/tasks/{id_}/cancel", content=b"{"), 400, "bad_json")
    expect_error(caller.post(f"/api/tasks/{id_}/cancel", json={"reason": "x" * 501}), 400, "misuse")
    assert task(uuid.UUID(id_))["status"] == "QUEUED"
