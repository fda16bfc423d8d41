"""How fast things happen now, how they were in each period, and how long most of them took, read from the tally."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from models.clock import now
from models.engine import engine
from models.sql import sql
from tally.append import APPEND, Counted, Sums, append_values
from tally.fold import fold
from tally.histograms import BOUNDS, count_values, quantile
from tally.subjects import Subject
from tally.totals import has_counted_tasks, read_pace, read_summed_history
from tests.outbox.ledger import move
from tests.servers import ServersOfTests

pytestmark = pytest.mark.usefixtures("ledger")


def append(counted: Counted, sums: Sums) -> None:
    with engine().begin() as connection:
        connection.execute(APPEND, append_values({counted: sums}))


def done(queue: str = "ingest", type: str = "some.type", result: str = "succeeded") -> Counted:
    return Counted(Subject.TASK, result, queue, type)


def to_second(stack: ServersOfTests, second: float) -> None:
    """Move the clock to this second of the next minute."""
    with engine().connect() as connection:
        at = now(connection)
    move(stack, 60 - at.second - at.microsecond / 1e6 + second)


def pace() -> dict[tuple[str, str, str], float]:
    with engine().connect() as connection:
        return {(each.subject, each.queue, each.result): each.per_second for each in read_pace(connection)}


def test_the_pace_is_that_of_the_last_sixty_seconds_whether_folded_or_not(ledger: ServersOfTests) -> None:
    assert pace() == {}
    to_second(ledger, 10)
    append(done(), Sums.of(600))
    append(done(type="other.type"), Sums.of(60))
    assert pace() == {("task", "ingest", "succeeded"): pytest.approx(11)}
    fold(engine(), budget_seconds=10)
    assert pace() == {("task", "ingest", "succeeded"): pytest.approx(11)}
    to_second(ledger, 15)  # three quarters of the minute before are less than 60 seconds ago
    append(done(), Sums.of(60))
    assert pace()["task", "ingest", "succeeded"] == pytest.approx(1 + 11 * 0.75, rel=0.02)
    to_second(ledger, 1)
    to_second(ledger, 1)
    assert pace() == {}


def test_the_pace_keeps_destinations_and_results_apart() -> None:
    append(Counted(Subject.PUBLISH, "success", "orders"), Sums.of(6))
    append(Counted(Subject.PUBLISH, "failure", "orders"), Sums.of(12))
    append(Counted(Subject.PUBLISH, "success", "billing"), Sums.of(18))
    found = pace()
    assert set(found) == {
        ("publish", "orders", "success"),
        ("publish", "orders", "failure"),
        ("publish", "billing", "success"),
    }


def test_a_summed_history_is_the_sum_over_queues_and_types(ledger: ServersOfTests) -> None:
    since = datetime.now(UTC) - timedelta(days=2)
    append(done("a", "x"), Sums.of(2, [0.002, 4.0], [0.5]))
    append(done("b", "y"), Sums.of(1, [0.002], [0.5]))
    append(done("b", "y", "dead"), Sums.of(1, [0.002]))
    fold(engine(), budget_seconds=10)
    for span in ("minute", "hour", "day"):
        with engine().connect() as connection:
            found = {each.result: each for each in read_summed_history(connection, span, since)}
        assert {result: each.count for result, each in found.items()} == {"succeeded": 3, "dead": 1}
        assert list(found["succeeded"].run) == count_values([0.002, 0.002, 4.0])
        assert list(found["succeeded"].wait) == count_values([0.5, 0.5])


def test_an_installation_has_counted_tasks_as_soon_as_one_was_delivered(ledger: ServersOfTests) -> None:
    def has_counted() -> bool:
        with engine().connect() as connection:
            return has_counted_tasks(connection)

    append(Counted(Subject.FLUSH, "outbox_flush_db_error"), Sums.of(1))
    assert not has_counted()
    append(done(), Sums.of(1))
    assert has_counted()
    fold(engine(), budget_seconds=10)
    with engine().begin() as connection:
        connection.execute(sql("DELETE FROM ledger.tally_period WHERE span <> 'ever'"))
    assert has_counted()


def test_a_quantile_lies_in_the_bucket_of_its_values() -> None:
    assert quantile([], 0.5) is None
    assert quantile([0, 0], 0.99) is None
    assert quantile(count_values([0.003] * 10), 0.5) == pytest.approx(0.00375), "in the middle of its bucket"
    mixed = count_values([0.003] * 90 + [20.0] * 10)
    assert quantile(mixed, 0.5) < 0.005  # type: ignore[operator]
    assert quantile(mixed, 0.9) == pytest.approx(0.005)
    assert 10 < quantile(mixed, 0.99) <= 30  # type: ignore[operator]
    assert quantile(count_values([10_000.0]), 0.5) == BOUNDS[-1], "there is no bound above"
