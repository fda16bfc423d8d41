"""The tally counts every settled task once, whatever is folded, read or settled at the same time."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy.orm import Session

import settings
from models.engine import engine, make_engine
from models.sql import sql
from tally import counts as counts_module
from tally.append import APPEND, Counted, Sums, append_values
from tally.counts import count, counts
from tally.fold import fold, forget_periods
from tally.histograms import BOUNDS, add, count_values
from tally.subjects import Subject
from tally.totals import Total, read_history, read_totals
from tasks.core.outcomes import Succeeded
from tasks.core.registry import find
from tasks.execution.claim import Claim
from tasks.execution.settle import write_outcomes
from tasks.operations import dead_tasks
from tests.outbox.ledger import move
from tests.servers import ServersOfTests, wait_until
from tests.tasks.deliveries import claimed, delivered, handled, raising, scalar, submitted, take_away

DONE = Counted(Subject.TASK, "succeeded", "ingest", "some.type")
pytestmark = pytest.mark.usefixtures("ledger")


@pytest.fixture(autouse=True)
def nothing_counted() -> None:
    counts._reset()


def append(*sums: Sums) -> None:
    with engine().begin() as connection:
        for each in sums:
            connection.execute(APPEND, append_values({DONE: each}))


def fold_all() -> int:
    return fold(engine(), budget_seconds=60)


def totals() -> list[Total]:
    with engine().connect() as connection:
        return read_totals(connection)


def total() -> int:
    return sum(each.count for each in totals())


def test_a_value_is_in_the_first_bucket_whose_bound_is_not_below_it() -> None:
    assert count_values([0.0, 0.001, 0.0011]) == [2, 1]
    assert count_values([BOUNDS[-1], BOUNDS[-1] + 1]) == [0] * (len(BOUNDS) - 1) + [1, 1]
    assert count_values([]) == []
    assert add([1, 2], [0, 1, 5]) == [1, 3, 5]


def test_folding_adds_counts_seconds_and_histograms_of_all_shapes() -> None:
    given = [Sums.of(1, [0.002], [0.5]), Sums.of(1, [0.002], [0.5]), Sums.of(2, [4.0, 4.0]), Sums.of(3)]
    append(*given)
    expected = sum(given, Sums())
    assert fold_all() == 4
    for _ in range(2):
        (found,) = totals()
        assert (found.subject, found.queue, found.type, found.result) == (
            Subject.TASK,
            "ingest",
            "some.type",
            "succeeded",
        )
        assert (found.count, list(found.run), list(found.wait)) == (expected.count, expected.run, expected.wait)
        assert (found.run_seconds, found.wait_seconds) == pytest.approx((expected.run_seconds, expected.wait_seconds))
        append(*given)
        fold_all()
        expected += sum(given, Sums())


def test_totals_include_what_is_not_folded_and_never_fall_while_others_append_and_fold() -> None:
    is_over = threading.Event()
    seen: list[int] = []
    folding = make_engine(settings.current().database_url)

    def fold_again_and_again() -> None:
        while not is_over.is_set():
            fold(folding, budget_seconds=1)

    def look() -> None:
        while not is_over.is_set():
            seen.append(total())

    threads = [threading.Thread(target=work) for work in (fold_again_and_again, fold_again_and_again, look)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(200):
            append(Sums.of(1, [0.01], [0.01]))
        wait_until(lambda: len(seen) > 20, "totals were read")
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
        folding.dispose()
    assert seen == sorted(seen)
    assert total() == 200
    fold_all()
    assert [sum(each.run) for each in totals()] == [200]


def test_totals_keep_apart_what_differs_in_one_respect_only_folded_or_not() -> None:
    kinds = [
        DONE,
        replace(DONE, subject=Subject.PUBLISH),
        replace(DONE, queue="other"),
        replace(DONE, type="other.type"),
        replace(DONE, result="dead"),
        replace(DONE, queue=DONE.type, type=DONE.queue),
    ]
    with engine().begin() as connection:
        for number, kind in enumerate(kinds, 1):
            for _ in range(2):
                connection.execute(APPEND, append_values({kind: Sums.of(number)}))

    def found() -> dict[Counted, int]:
        return {Counted(each.subject, each.result, each.queue, each.type): each.count for each in totals()}

    assert found() == {kind: 2 * number for number, kind in enumerate(kinds, 1)}
    fold_all()
    append(Sums.of(10))
    assert found() == {kind: 2 * number + 10 * (kind == DONE) for number, kind in enumerate(kinds, 1)}


def test_a_row_that_commits_after_a_fold_with_a_lower_number_is_folded_by_the_next() -> None:
    with engine().connect() as late:
        late.execute(APPEND, append_values({DONE: Sums.of(1)}))
        append(Sums.of(10))
        assert fold_all() == 1
        late.commit()
    assert (fold_all(), total()) == (1, 11)


def test_history_has_minutes_hours_and_days_and_forgets_the_older_ones(ledger: ServersOfTests) -> None:
    since = datetime.now(UTC) - timedelta(days=2)
    append(Sums.of(1))
    move(ledger, 60)
    append(Sums.of(2))
    fold_all()
    with engine().connect() as connection:
        assert [each.count for each in read_history(connection, "minute", since)] == [1, 2]
        assert [sum(each.count for each in read_history(connection, span, since)) for span in ("hour", "day")] == [3, 3]
        assert read_history(connection, "day", since, type="other.type") == []
    move(ledger, timedelta(days=3).total_seconds())
    forget_periods(engine())
    with engine().connect() as connection:
        assert read_history(connection, "minute", since) == []
        assert sum(each.count for each in read_history(connection, "hour", since)) == 3
    move(ledger, timedelta(days=100).total_seconds())
    forget_periods(engine())
    with engine().connect() as connection:
        assert read_history(connection, "hour", since) == []
        assert sum(each.count for each in read_history(connection, "day", since)) == 3
    assert total() == 3


# counts of a process


def test_counts_of_a_process_are_appended_about_a_second_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts_module, "APPEND_SECONDS", 0.01)
    for _ in range(3):
        count(Subject.TASK, "skipped", 2)
    wait_until(lambda: total() == 6, "six are counted")
    count(Subject.TASK, "skipped", 0)
    assert not counts._sums, "nothing happened, so nothing is counted"


def test_counts_are_kept_while_the_ledger_is_unreachable(
    ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    count(Subject.TASK, "skipped", 2, runs=[1.0])
    with monkeypatch.context() as changed:
        changed.setenv("DATABASE_URL", "postgresql://celeriac@127.0.0.1:1/nothing")
        settings.current.cache_clear()
        counts.append()
        count(Subject.TASK, "skipped", 1)
        counts.append()
    settings.current.cache_clear()
    assert [getattr(record, "event", "") for record in caplog.records] == ["tally_delayed"]
    counts.append()
    assert total() == 3
    fold_all()
    assert [sum(each.run) for each in totals()] == [1]


def test_a_forked_child_does_not_append_what_its_parent_has_counted() -> None:
    count(Subject.TASK, "skipped", 5)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        count(Subject.TASK, "skipped", 1)
        os.write(writer, str([each.count for each in counts._sums.values()]).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 100) == b"[1]"
    counts.append()
    assert total() == 5


# settling


def settled(claim: Claim, *, commits: bool = True) -> None:
    spent = dict.fromkeys(claim.tasks, 0.02)
    with Session(engine()) as db:
        outcomes = dict.fromkeys(claim.tasks, Succeeded())
        write_outcomes(db, outcomes, token=claim.token, handler=find("test.insert"), is_last=True, spent=spent)
        db.commit() if commits else db.rollback()


def test_tasks_that_another_worker_took_over_are_not_counted_and_the_others_are() -> None:
    claim = claimed(submitted(5), batch_of=lambda _handler: 5)
    take_away(claim.tasks[0].id)
    settled(claim)
    rows = scalar("SELECT jsonb_agg(jsonb_build_array(result, count, run, wait_seconds > 0)) FROM ledger.task_tally")
    assert rows == [["succeeded", 4, count_values([0.02] * 4), True]]


def test_a_batch_that_is_rolled_back_leaves_no_row() -> None:
    settled(claimed(submitted(2)), commits=False)
    assert scalar("SELECT count(*) FROM ledger.task_tally") == 0


def test_a_task_waits_since_it_was_due_and_a_requeued_one_since_its_requeue(ledger: ServersOfTests) -> None:
    (id_,) = submitted(1, max_attempts=1, run_at=timedelta(seconds=100))
    move(ledger, 160)
    with handled("test.insert", raising(ValueError())):
        delivered([id_])
    assert 60 <= scalar("SELECT wait_seconds FROM ledger.task_tally") < 100
    move(ledger, 1000)
    with engine().begin() as connection:
        connection.execute(sql("DELETE FROM ledger.task_tally"))
    assert list(dead_tasks.requeue(engine(), dead_tasks.Choice(), actor="me"))
    move(ledger, 5)
    delivered([id_])
    assert 5 <= scalar("SELECT wait_seconds FROM ledger.task_tally") < 60
