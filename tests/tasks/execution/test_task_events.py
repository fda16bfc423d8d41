"""What a worker's processes report for Flower: every failure, no payload, and nothing while events are off."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

import settings
from models.engine import engine
from tasks import Discard, Permanent, Snooze
from tasks.core.outcomes import DONE, Dead, ErrorCode, Failure, Released, Retry
from tasks.core.task import Task
from tasks.execution.deliver import deliver
from tasks.execution.settle import release_token
from tasks.execution.task_events import KEPT_DATAGRAMS, EventChannel, report_settled
from tasks.recovery.reclaim import reclaim_leases
from tests.servers import ServersOfTests
from tests.tasks.deliveries import claimed, raising, run_claim, scripted, submitted
from tests.tasks.execution.event_channels import channel_in_use, states, written
from tests.tasks.lost_workers import killed, later, reclaim_lost, start_child
from tests.tasks.work import OnPurpose, rows

pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")
SECRET = "4111 1111 1111 1111"


@pytest.fixture
def channel() -> Iterator[EventChannel]:
    with channel_in_use() as channel:
        channel.grant(100, at_most=100)
        yield channel


@pytest.mark.parametrize(
    ("script", "max_attempts", "last", "fields"),
    [
        (lambda *_: {"card": SECRET}, 3, "succeeded", {"exception": None}),
        (raising(OnPurpose("no customer")), 3, "retried", {"exception": "OnPurpose: no customer"}),
        (raising(OnPurpose("no customer")), 1, "failed", {"exception": "OnPurpose: no customer"}),
        (raising(Permanent("never")), 3, "failed", {"exception": "Permanent: never"}),
        (raising(Snooze(60)), 3, "retried", {"exception": "Snoozed: snoozed"}),
        (raising(Discard("not needed")), 3, "revoked", {"exception": "not needed"}),
    ],
    ids=["success", "failure", "last failure", "permanent failure", "snooze", "discard"],
)
def test_a_task_is_reported_with_its_type_its_outcome_and_its_error_but_without_payload_and_result(
    channel: EventChannel, script: Any, max_attempts: int, last: str, fields: dict[str, Any]
) -> None:
    (id_,) = scripted(script, max_attempts=max_attempts, context={"card": SECRET})
    deliver(engine(), [id_])
    events = written(channel)
    assert states(events) == {str(id_): ["received", "started", last]}
    assert {event["name"] for event in events} == {"test.scripted"}
    assert events[-1].items() >= fields.items()
    assert (events[0]["retries"], events[0]["routing_key"]) == (0, "ingest")
    assert events[0]["timestamp"] <= events[-1]["timestamp"]
    assert not {"args", "kwargs", "result", "traceback"} & {name for event in events for name in event}
    assert SECRET not in json.dumps(events)
    if last in ("succeeded", "failed"):
        assert events[-1]["runtime"] > 0


def test_the_second_attempt_says_that_it_is_a_retry(channel: EventChannel, ledger: ServersOfTests) -> None:
    (id_,) = scripted(raising(OnPurpose()), max_attempts=2)
    deliver(engine(), [id_])
    written(channel)
    later(ledger, 3600)
    deliver(engine(), [id_])
    first, _, last = written(channel)
    assert (first["retries"], last["type"]) == (1, "task-failed")


def test_nothing_is_written_while_events_are_off(channel: EventChannel) -> None:
    channel.switch(on=False)
    ids = [*submitted(20), *submitted(2, "test.fail")]
    deliver(engine(), ids)
    assert written(channel) == []
    assert {status for status, _ in rows()} == {"SUCCEEDED", "RETRYING"}


def test_only_granted_tasks_are_followed_and_each_of_them_to_its_end(channel: EventChannel) -> None:
    channel.take_grant(98)
    ids = submitted(5)
    run_claim(claimed(ids))
    assert list(states(written(channel)).values()) == [["received", "started", "succeeded"]] * 2
    deliver(engine(), submitted(5))
    assert written(channel) == []


@pytest.mark.parametrize(("max_attempts", "last"), [(1, "failed"), (3, "retried")])
def test_a_failure_is_reported_completely_although_nothing_was_granted(
    channel: EventChannel, max_attempts: int, last: str
) -> None:
    channel.take_grant(100)
    good, bad = submitted(3), submitted(1, "test.fail", max_attempts=max_attempts)
    deliver(engine(), [*good, *bad])
    events = written(channel)
    assert states(events) == {str(bad[0]): ["received", "started", last]}
    assert events[-1]["exception"] == "OnPurpose: on purpose"


def test_an_outcome_that_another_holder_decides_is_not_reported(channel: EventChannel) -> None:
    own = claimed(submitted(2))
    reclaim_leases(engine(), settings.current(), holders=["another:1"])
    run_claim(own)
    assert {kinds[-1] for kinds in states(written(channel)).values()} == {"started"}


@pytest.mark.parametrize(("attempts", "last"), [(1, "failed"), (3, "retried")])
def test_what_reclaim_decides_about_a_killed_worker_is_reported(
    channel: EventChannel, ledger: ServersOfTests, attempts: int, last: str
) -> None:
    ids = submitted(1, max_attempts=attempts)
    killed(ids, "ingest.after_effect=kill")
    reclaim_lost(ledger)
    events = written(channel)
    assert states(events) == {str(ids[0]): ["received", "started", last]}
    assert "was lost while it ran this task" in events[-1]["exception"]


def test_the_tasks_of_a_lost_batch_do_not_stay_started(channel: EventChannel, ledger: ServersOfTests) -> None:
    killed(submitted(2), "ingest.after_effect=kill")
    reclaim_lost(ledger)
    events = written(channel)
    assert list(states(events).values()) == [["received", "started", "retried"]] * 2
    assert events[-1]["exception"].startswith("Isolated: ")


def test_a_task_does_not_stay_started_when_its_token_is_released_from_outside(channel: EventChannel) -> None:
    """As when a thread hangs in a worker that stops."""
    (id_,) = submitted(1)
    release_token(engine(), claimed([id_]).token, Released("its thread did not stop"))
    release_token(engine(), uuid.uuid4(), Released("nothing was claimed"))
    (event,) = written(channel)
    assert (event["uuid"], event["type"]) == (str(id_), "task-retried")
    assert event["exception"] == "Released: its thread did not stop"


def test_a_full_socket_drops_successes_keeps_failures_and_delays_nobody(channel: EventChannel) -> None:
    """The main process does not read, as if it were stopped."""
    task = Task(uuid.uuid4(), "test.fail", {}, {}, "ingest", 5, 0, 3, None, None, None)  # type: ignore[arg-type]
    failure = Failure(ErrorCode.HANDLER_ERROR, "x" * 100, "")
    written_before = fill(channel)
    for _ in range(KEPT_DATAGRAMS):
        report_settled({task: Retry(failure)}, ())
        report_settled({task: DONE}, [task])
    for _ in range(written_before):
        assert channel.read()
    report_settled({task: Dead(failure)}, [task])
    kinds = states(written(channel))[str(task.id)]
    assert kinds == [*["received", "started", "retried"] * KEPT_DATAGRAMS, "failed"]


def fill(channel: EventChannel) -> int:
    """Write until the socket is full; return how many datagrams it holds."""
    held = 0
    while channel._send(b"[{}]"):
        held += 1
    return held


def test_events_of_a_child_process_reach_its_parent_and_share_the_grant(channel: EventChannel) -> None:
    channel.take_grant(97)
    ids = submitted(2)
    os.waitpid(start_child(lambda: deliver(engine(), ids)), 0)
    deliver(engine(), submitted(5))
    assert len(states(written(channel))) == 3
