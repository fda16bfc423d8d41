"""The crash-test kit for users: it kills a worker at every window, and finds effects that are doubled or lost."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from models.engine import engine
from sinks.configuration import open_sinks
from sinks.recovery import recover
from tasks import Finish, Snooze
from tasks.core.task import Task
from tasks.testing import CrashReport, Window, crash_test
from tests.servers import ServersOfTests
from tests.sinks.places import KeyedPlace, TwoPhasePlace, insert
from tests.tasks.deliveries import handled
from tests.tasks.work import INTO_SINK, effects

TYPE = "test.crash"
COUNT = text("SELECT count(*) FROM public.effect WHERE task_id = :id AND n = :n")


@pytest.fixture
def two_sinks(other: Engine, configure: Callable[..., None], ledger: ServersOfTests) -> Iterator[Engine]:
    """The keyed sink `keyed` and the two-phase sinks `first` and `second`, all in one other database."""
    url = other.url.render_as_string(hide_password=False)
    configure(
        keyed={"url": url, "guarantee": "keyed"},
        first={"url": url, "guarantee": "two_phase"},
        second={"url": url, "guarantee": "two_phase"},
    )
    open_sinks().find("keyed").prepare()
    yield other
    assert TwoPhasePlace(other).left_behind() == []


def writing_to(*sinks: str) -> Callable[[Task], Any]:
    def write(task: Task) -> None:
        for number, sink in enumerate(sinks):
            task.sink(sink).run(insert, task.id, number)

    return write


def counting_in(other: Engine, sinks: int) -> Callable[[uuid.UUID], int]:
    """Return a function that counts the effects in each sink; if they differ, it returns the largest wrong number."""

    def count(task_id: uuid.UUID) -> int:
        with other.begin() as connection:
            found = {connection.execute(COUNT, {"id": task_id, "n": n}).scalar_one() for n in range(sinks)}
        return int(max(found - {1}, default=1))

    return count


def windows_of(report: CrashReport) -> list[str]:
    return [str(crash.window) for crash in report.crashes if crash.window]


def in_ledger(task_id: uuid.UUID) -> int:
    return effects()[task_id]


@pytest.mark.guarantee
def test_a_handler_with_a_keyed_and_a_two_phase_sink_has_one_effect_in_each_wherever_its_worker_dies(
    two_sinks: Engine,
) -> None:
    with handled(TYPE, writing_to("keyed", "first"), transactional=False):
        report = crash_test(TYPE, effects=counting_in(two_sinks, 2))
    report.assert_once()
    assert set(windows_of(report)) > set(KeyedPlace.windows + TwoPhasePlace.windows)


@pytest.mark.guarantee
def test_an_async_handler_has_one_effect_in_each_sink_and_in_the_ledger_wherever_its_worker_dies(
    two_sinks: Engine,
) -> None:
    async def write(task: Task) -> Finish:
        for number, sink in enumerate(("keyed", "first")):
            await task.sink(sink).run(insert, task.id, number)
        note = await task.step("note", lambda: "noted")
        return Finish(lambda db: db.execute(INTO_SINK, {"task_id": task.id, "note": note}))

    def count(task_id: uuid.UUID) -> int:
        found = {counting_in(two_sinks, 2)(task_id), in_ledger(task_id)}
        return max(found - {1}, default=1)

    with handled(TYPE, write):
        report = crash_test(TYPE, effects=count)
    report.assert_once()
    assert set(windows_of(report)) > set(KeyedPlace.windows + TwoPhasePlace.windows)


@pytest.mark.guarantee
def test_two_databases_that_commit_together_do_so_wherever_the_worker_dies_between_them(two_sinks: Engine) -> None:
    with handled(TYPE, writing_to("first", "second"), transactional=False):
        report = crash_test(TYPE, effects=counting_in(two_sinks, 2))
    report.assert_once()
    assert {"sinks.after_prepare (pass 2)", "sinks.before_commit (pass 2)"} <= set(windows_of(report))


@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("function", "how"),
    [
        (lambda task, db: db.execute(INTO_SINK, {"task_id": task.id, "note": ""}) and None, {}),
        (
            lambda tasks, db: db.execute(INTO_SINK, [{"task_id": task.id, "note": ""} for task in tasks]) and None,
            {"many": True},
        ),
        (
            lambda task: Finish(lambda db: db.execute(INTO_SINK, {"task_id": task.id, "note": ""})),
            {"transactional": False},
        ),
    ],
    ids=["transactional", "batch handler", "Finish"],
)
def test_an_effect_in_the_ledgers_database_happens_once_wherever_the_worker_dies(
    function: Callable[..., Any], how: dict[str, Any], ledger: ServersOfTests
) -> None:
    with handled(TYPE, function, **how):
        report = crash_test(TYPE, effects=in_ledger)
    report.assert_once()
    assert set(windows_of(report)) >= {"ingest.after_claim", "ingest.after_effect", "ingest.after_settle"}


def test_a_handler_that_writes_beside_its_sinks_is_found_and_the_table_says_where(two_sinks: Engine) -> None:
    def write(task: Task) -> None:
        with Session(two_sinks) as session:
            insert(session, task.id)
            session.commit()

    with handled(TYPE, write, transactional=False):
        report = crash_test(TYPE, effects=counting_in(two_sinks, 1))
    assert [str(crash.window) for crash in report.wrong] == ["ingest.in_handler"]
    with pytest.raises(AssertionError) as raised:
        report.assert_once()
    assert str(raised.value).splitlines() == [
        f"{TYPE}: 1 of 3 tasks did not end with one effect",
        "killed at           effects  status",
        "no crash            1        SUCCEEDED",
        "ingest.after_claim  1        SUCCEEDED",
        "ingest.in_handler   2        SUCCEEDED  ← not one effect",
    ]


def test_every_pass_of_a_window_is_tried_up_to_the_limit(ledger: ServersOfTests) -> None:
    def step_five_times(task: Task) -> Finish:
        for number in range(5):
            task.step(f"step {number}", lambda: None)
        return Finish(lambda db: db.execute(INTO_SINK, {"task_id": task.id, "note": ""}))

    with handled(TYPE, step_five_times, transactional=False):
        report = crash_test(TYPE, effects=in_ledger, most_passes=3)
    report.assert_once()
    passes = [crash.window.nth for crash in report.crashes if crash.window and crash.window.name == "steps.after_keep"]
    assert passes == [1, 2, 3]
    assert str(report).endswith("4 more passes of these windows were not tried.")


def test_a_task_that_fails_without_a_crash_is_reported_instead_of_killed(ledger: ServersOfTests) -> None:
    def fail(task: Task) -> None:
        raise LookupError("there is no such invoice")

    with handled(TYPE, fail, transactional=False, max_attempts=1):
        report = crash_test(TYPE, effects=in_ledger)
    (crash,) = report.crashes
    assert (crash.window, crash.status, crash.effects) == (None, "DEAD", 0)
    with pytest.raises(AssertionError, match="← LookupError: there is no such invoice"):
        report.assert_once()


def test_a_task_that_may_run_once_only_can_be_tested_all_the_same(ledger: ServersOfTests) -> None:
    """The crash counts as an attempt, so such a task would be DEAD after each."""
    with handled(
        TYPE, lambda task, db: db.execute(INTO_SINK, {"task_id": task.id, "note": ""}) and None, max_attempts=1
    ):
        crash_test(TYPE, effects=in_ledger).assert_once()


def test_a_worker_that_takes_another_way_the_second_time_is_reported(ledger: ServersOfTests) -> None:
    """A window that was not reached proves nothing."""

    def step_in_the_first_task_only(task: Task) -> Finish:
        if task.payload == 0:
            task.step("first", lambda: None)
        return Finish(lambda db: db.execute(INTO_SINK, {"task_id": task.id, "note": ""}))

    with handled(TYPE, step_in_the_first_task_only, transactional=False):
        report = crash_test(TYPE, lambda number: number, effects=in_ledger)
    assert [crash.window for crash in report.wrong] == [Window("steps.before_keep"), Window("steps.after_keep")]
    assert "← its worker did not pass this window: it exited with code 0" in str(report)


def test_a_task_that_is_never_final_does_not_hang_the_test(ledger: ServersOfTests) -> None:
    def snooze(task: Task) -> None:
        raise Snooze(3600)

    with handled(TYPE, snooze, transactional=False):
        (crash,) = crash_test(TYPE, effects=in_ledger).crashes
    assert crash.status == "RETRYING"


@pytest.mark.usefixtures("two_sinks")
def test_a_transaction_that_its_sink_does_not_finish_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The effect may be visible by then, but a lock or a prepared transaction could be left."""
    monkeypatch.setattr("tasks.testing.crashes.recover", lambda _engine: None)
    with handled(TYPE, writing_to("first"), transactional=False):
        report = crash_test(TYPE, effects=lambda _: 1)
    wrong = {str(crash.window): crash.error for crash in report.wrong}
    assert wrong["sinks.before_commit"] == "a transaction in a sink is not finished"
    recover(engine())
