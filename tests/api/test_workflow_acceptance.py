"""The acceptance lines of seeds/001 that are about workflows, in its own words; its Mongo is a table of a stage here.

Its last line, about queues that pile up, is about all tasks.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import text

import failpoint
import settings
from api.tokens import Scope
from models.engine import engine
from outbox.after_commit_publisher import submitter
from tasks import broker
from tasks.execution.deliver import ingest
from tasks.operations import dead_tasks
from tests.api.callers import Caller, Callers
from tests.outbox import ledger as outbox_ledger
from tests.outbox.ledger import move, woken
from tests.servers import ServersOfTests, wait_until
from tests.tasks.deliveries import leases
from tests.tasks.work import task, transitions
from tests.workflows.flows import FLOW, KEYS, SUMMARY, stored, tables
from tests.workflows.lost_workers import taken_over, worker
from tests.workflows.outside import Outside

APPLY = "/api/workflows/apply"


@pytest.fixture
def outside(stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> Iterator[Outside]:
    tables()
    outside = Outside()
    crm = f"http://127.0.0.1:{outside.port}/crm?allow_private=1&allow_http=1"
    monkeypatch.setenv("OUTBOX_DESTINATIONS", json.dumps({"crm": crm}))
    monkeypatch.setenv("LLM_BASE_URL", f"http://127.0.0.1:{outside.port}/v1")
    settings.current.cache_clear()
    yield outside
    outside.end()
    failpoint.arm()


@pytest.fixture
def caller(callers: Callers) -> Caller:
    return callers(Scope.WORKFLOWS_SUBMIT, Scope.TASKS_READ, name="ci")


def applied(caller: Caller) -> uuid.UUID:
    answer = caller.post(APPLY, json=FLOW)
    assert answer.status_code == 202
    return uuid.UUID(answer.json()["taskId"])


def status(caller: Caller, task_id: uuid.UUID) -> tuple[str, int]:
    """As whoever asked sees it."""
    shown = caller.get(f"/api/tasks/{task_id}").json()
    return shown["status"], shown["retry"]["count"]


@contextmanager
def a_worker(stack: ServersOfTests) -> Iterator[None]:
    """Runs whatever the broker wake-ups for."""

    def run() -> None:
        wait_until(lambda: woken(stack), "the bell wake-ups")
        ids = [uuid.UUID(one) for message in woken(stack) for one in message]
        broker.purge("ingest")
        ingest(engine(), ids)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@contextmanager
def mongo_is_down() -> Iterator[None]:
    """What the stage `store` writes to is not there."""
    with engine().begin() as connection:
        connection.execute(text("ALTER TABLE public.test_stored RENAME TO test_stored_elsewhere"))
    try:
        yield
    finally:
        with engine().begin() as connection:
            connection.execute(text("ALTER TABLE test_stored_elsewhere RENAME TO test_stored"))


def test_given_all_is_well_when_a_workflow_is_applied_then_it_is_stored_and_the_real_output_returned(
    caller: Caller, outside: Outside, stack: ServersOfTests
) -> None:
    """GIVEN Mongo 正常、Redis 正常 … THEN … 返回真实 LLM 输出,并且 Redis 中无遗留 pending"""
    with a_worker(stack):
        answer = caller.post(f"{APPLY}?wait=30", json=FLOW)
    assert (answer.status_code, answer.json()["status"]) == (200, "SUCCEEDED")
    assert answer.json()["result"]["output"]["stored"] == SUMMARY
    assert stored() == [(f"ci:{KEYS[2]}", SUMMARY)]
    assert submitter().flush(20)
    assert leases() == 0
    assert outbox_ledger.rows("status") == [("SENT",)]
    assert broker.depths(["ingest"]) == {"ingest": 0}


def test_given_mongo_is_down_when_a_workflow_is_applied_then_it_is_retried_and_completes_when_mongo_is_back(
    caller: Caller, outside: Outside, stack: ServersOfTests
) -> None:
    """GIVEN Mongo 停机 … THEN 任务 … 在 Mongo 恢复前保持重试状态,Mongo 恢复后自动完成,最终数据一致"""
    with mongo_is_down():
        id_ = applied(caller)
        ingest(engine(), [id_])
        assert status(caller, id_) == ("RETRYING", 1)
        move(stack, 60)
        ingest(engine(), [id_])
        assert status(caller, id_) == ("RETRYING", 2)
    move(stack, 300)
    ingest(engine(), [id_])
    assert status(caller, id_) == ("SUCCEEDED", 2)
    assert stored() == [(f"ci:{KEYS[2]}", SUMMARY)]
    assert outside.calls == {f"ci:{key}": 1 for key in KEYS[:2]}


def test_given_a_task_failed_three_times_then_it_is_suspended_and_can_be_seen_run_again_or_given_up(
    caller: Caller, outside: Outside, stack: ServersOfTests
) -> None:
    """GIVEN 某任务连续失败 3 次,WHEN 达到阈值,THEN 任务进入 queue:suspended,运维可 … 查看并重新执行或放弃"""
    ids = [applied(caller), applied(caller)]
    with mongo_is_down():
        for wait_seconds in (60, 300, 0):
            for id_ in ids:
                ingest(engine(), [id_])
            move(stack, wait_seconds)
    assert [status(caller, id_) for id_ in ids] == [("DEAD", 3)] * 2
    shown = caller.get(f"/api/tasks/{ids[0]}").json()
    assert shown["payload"] == FLOW
    assert "test_stored" in shown["errorMessage"]
    assert "Traceback" in shown["lastError"]
    assert [to for _, to in transitions(ids[0])] == ["QUEUED", *["RUNNING", "RETRYING"] * 2, "RUNNING", "DEAD"]
    list(dead_tasks.requeue(engine(), dead_tasks.Choice(ids=[ids[0]]), actor="ops"))
    list(dead_tasks.discard(engine(), dead_tasks.Choice(ids=[ids[1]]), actor="ops"))
    ingest(engine(), ids[:1])
    assert [task(id_)["status"] for id_ in ids] == ["SUCCEEDED", "DISCARDED"]


def test_given_a_worker_crashed_when_another_is_there_then_it_takes_over_and_goes_on(
    caller: Caller, outside: Outside, stack: ServersOfTests
) -> None:
    """GIVEN Worker 进程崩溃,WHEN 重新拉起 Worker,THEN Redis pending 任务能够被自动接管并继续处理"""
    id_ = applied(caller)
    with worker(id_, "steps.after_keep=kill@2") as lost:
        assert lost.is_killed()
    assert status(caller, id_) == ("RUNNING", 0)
    taken_over(stack, id_)
    assert status(caller, id_) == ("SUCCEEDED", 1)
    assert outside.calls == {f"ci:{key}": 1 for key in KEYS[:2]}
    assert stored() == [(f"ci:{KEYS[2]}", SUMMARY)]
