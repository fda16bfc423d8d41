"""The search for tasks: pages in both directions lose and repeat nothing, with every filter, wherever reading ends."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection

from api.tokens import Scope
from models.engine import engine
from models.sql import sql
from models.status import TaskStatus
from tasks.core.task_ids import keyed_id
from tasks.operations.listing import FINAL, Cursor, TaskFilter
from tasks.operations.task_search import FoundTask, SearchPage, ids_with_key, known_types, search
from tests.api.callers import make_token
from tests.servers import ServersOfTests
from tests.tasks.command_line import buried, submitted
from tests.tasks.registrations import handler_of, registered

BEGIN = datetime(2026, 11, 16, 10, 0, tzinfo=UTC)
INSERT = sql("""
    INSERT INTO ledger.ingest_task (id, type, queue, payload, status, lease_token, next_retry_at, partition_key,
                                    key_seq, last_error, error_message, error_code, error_fingerprint,
                                    updated_at, finished_at)
    VALUES (:id, :type, :queue, '{}', :status, :token, CASE WHEN :status = 'RETRYING' THEN CAST(:at AS timestamptz) END,
            :partition_key, CASE WHEN :partition_key IS NOT NULL THEN nextval('ledger.ingest_task_key_seq') END,
            :error, :error, CASE WHEN :error IS NOT NULL THEN 'timeout' END,
            ledger.ingest_error_fingerprint('timeout', :error), :at,
            CASE WHEN :status IN ('SUCCEEDED', 'DEAD', 'DISCARDED') THEN CAST(:at AS timestamptz) END)
""")
LEASE = sql("""
    INSERT INTO ledger.task_lease (token, holder, lease_until, task_ids, type, queue, priority)
    SELECT lease_token, 'w', 'infinity', array_agg(id), 'a', 'q', 5 FROM ledger.ingest_task
    WHERE lease_token IS NOT NULL GROUP BY lease_token
""")
TOKEN = uuid.uuid4()


def insert(
    connection: Connection,
    status: TaskStatus,
    seconds: float,
    *,
    type: str = "a",
    queue: str = "q",
    error: str | None = None,
    partition_key: str | None = None,
) -> uuid.UUID:
    """Insert a task that changed so many seconds after BEGIN, and return its id."""
    values: dict[str, Any] = {"id": uuid.uuid4(), "status": status, "at": BEGIN + timedelta(seconds=seconds)}
    values |= {"type": type, "queue": queue, "error": error, "partition_key": partition_key}
    values["token"] = TOKEN if status is TaskStatus.RUNNING else None
    connection.execute(INSERT, values)
    return uuid.UUID(str(values["id"]))


def find(chosen: TaskFilter, **how: Any) -> SearchPage:
    with engine().connect() as connection:
        return search(connection, chosen, **how)


def pages(chosen: TaskFilter, *, oldest_first: bool, **how: Any) -> Iterator[SearchPage]:
    """Follow the links of a list from its first page to its last."""
    page = find(chosen, oldest_first=oldest_first, **how)
    yield page
    while cursor := page.newer if oldest_first else page.older:
        place = {"after": cursor} if oldest_first else {"before": cursor}
        page = find(chosen, oldest_first=oldest_first, **place, **how)
        yield page


def back_from(place: Cursor, chosen: TaskFilter, *, oldest_first: bool, **how: Any) -> list[uuid.UUID]:
    """Follow the links back from a task to the first page, and return what they show, in the order of the list."""
    found: list[uuid.UUID] = []
    cursor: Cursor | None = place
    while cursor:
        where = {"before": cursor} if oldest_first else {"after": cursor}
        page = find(chosen, oldest_first=oldest_first, **where, **how)
        found[:0] = [each.task_id for each in page.tasks]
        cursor = page.older if oldest_first else page.newer
    return found


def ids_of(found: Iterator[SearchPage]) -> list[uuid.UUID]:
    return [each.task_id for page in found for each in page.tasks]


def place_of(task: FoundTask) -> tuple[datetime, uuid.UUID]:
    return task.changed_at, task.task_id


@pytest.fixture
def mixed(stack: ServersOfTests) -> list[FoundTask]:
    """Tasks in every status, many of which changed at the same moment; the latest first."""
    with engine().begin() as connection:
        for number in range(72):
            status = list(TaskStatus)[number % 6]
            key = f"k{number % 2}" if number % 5 == 0 else None
            error = f"error {number % 4}" if number % 3 == 0 else None
            second = number * 7 % 10
            insert(connection, status, second, type="ab"[number % 7 == 0], error=error, partition_key=key)
        connection.execute(LEASE)
    found = find(TaskFilter(), limit=1000).tasks
    assert len(found) == 72
    return found


def matches(task: FoundTask, chosen: TaskFilter) -> bool:
    """Say, without SQL, whether a task matches."""
    return (
        (not chosen.statuses or task.status in chosen.statuses)
        and chosen.type in (None, task.type)
        and chosen.partition_key in (None, task.partition_key)
        and chosen.error_code in (None, task.error_code)
        and (chosen.error_text is None or chosen.error_text in (task.error_message or ""))
        and (chosen.since is None or task.changed_at >= chosen.since)
        and (chosen.until is None or task.changed_at < chosen.until)
    )


filters = st.builds(
    TaskFilter,
    statuses=st.frozensets(st.sampled_from(TaskStatus)),
    type=st.sampled_from([None, "a", "b", "c"]),
    since=st.sampled_from([None, BEGIN + timedelta(seconds=3)]),
    until=st.sampled_from([None, BEGIN + timedelta(seconds=8)]),
    error_code=st.sampled_from([None, "timeout"]),
    partition_key=st.sampled_from([None, "k0"]),
    error_text=st.sampled_from([None, "error 3"]),
)


def test_following_the_pages_in_any_direction_and_order_finds_each_match_once(mixed: list[FoundTask]) -> None:
    @given(filters, st.integers(2, 9), st.integers(3, 15), st.booleans())
    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    def check(chosen: TaskFilter, limit: int, ceiling: int, oldest_first: bool) -> None:
        expected = sorted((each for each in mixed if matches(each, chosen)), key=place_of, reverse=not oldest_first)
        how: dict[str, Any] = {"limit": limit, "ceiling": ceiling, "oldest_first": oldest_first}
        found = list(pages(chosen, **how))
        assert ids_of(iter(found)) == [each.task_id for each in expected]
        assert all(len(page.tasks) == limit for page in found[:-1] if not page.is_cut)
        assert not found[-1].is_cut
        if expected:
            back = back_from(Cursor(expected[-1].changed_at, expected[-1].task_id), chosen, **how)
            assert back == [each.task_id for each in expected[:-1]]

    check()


def test_the_page_before_the_second_one_is_the_first(mixed: list[FoundTask]) -> None:
    for oldest_first in (False, True):
        first = find(TaskFilter(), limit=10, oldest_first=oldest_first)
        onwards = {"after": first.newer} if oldest_first else {"before": first.older}
        second = find(TaskFilter(), limit=10, oldest_first=oldest_first, **onwards)
        back = {"before": second.older} if oldest_first else {"after": second.newer}
        again = find(TaskFilter(), limit=10, oldest_first=oldest_first, **back)
        assert again.tasks == first.tasks
        assert (first.older if oldest_first else first.newer) is None
        assert (again.older if oldest_first else again.newer) is None, "there is nothing before the first page"


def test_a_full_page_shows_nothing_beyond_the_place_where_another_index_was_left(stack: ServersOfTests) -> None:
    """Dead tasks fill the page, while those that wait were not read far enough to say what comes between."""
    with engine().begin() as connection:
        for second in range(20):
            insert(connection, TaskStatus.QUEUED, 100 + second, type="other")
        between = insert(connection, TaskStatus.QUEUED, 50)
        dead = [insert(connection, TaskStatus.DEAD, second) for second in range(8)]
    chosen = TaskFilter(type="a")
    how: dict[str, Any] = {"limit": 3, "ceiling": 5}
    first = find(chosen, **how)
    assert first.tasks == []
    assert first.is_cut
    assert ids_of(pages(chosen, oldest_first=False, **how)) == [between, *reversed(dead)]


def test_a_filter_that_matches_little_ends_at_the_ceiling_and_says_so(stack: ServersOfTests) -> None:
    with engine().begin() as connection:
        rare = insert(connection, TaskStatus.DEAD, 0, type="rare")
        for second in range(1, 31):
            insert(connection, TaskStatus.DEAD, second)
    found = list(pages(TaskFilter(type="rare"), oldest_first=False, ceiling=10))
    assert [(len(page.tasks), page.is_cut) for page in found] == [(0, True), (0, True), (0, True), (1, False)]
    assert [page.older and page.older.changed_at for page in found] == [
        *(BEGIN + timedelta(seconds=second) for second in (21, 11, 1)),
        None,
    ]
    assert found[-1].tasks[0].task_id == rare


def test_a_page_reads_no_more_tasks_than_the_ceiling(stack: ServersOfTests) -> None:
    buried(400, type="other")
    with engine().begin() as connection:
        connection.execute(sql("ANALYZE ledger.ingest_task"))
    seen = find(TaskFilter([TaskStatus.DEAD], type="rare"), ceiling=100)
    assert (seen.tasks, seen.is_cut) == ([], True)
    assert not find(TaskFilter([TaskStatus.DEAD], type="rare"), ceiling=401).is_cut


@pytest.mark.parametrize("status", TaskStatus)
def test_each_filter_finds_its_task_in_every_status(stack: ServersOfTests, status: TaskStatus) -> None:
    with engine().begin() as connection:
        id_ = insert(connection, status, 5, type="a", queue="fast", error="No Such File x%", partition_key="k")
        insert(connection, status, 6, type="b", queue="slow", error="Another", partition_key="l")
        connection.execute(LEASE)
        fingerprint = connection.execute(
            sql("SELECT error_fingerprint FROM ledger.ingest_task WHERE id = :id"), {"id": id_}
        ).scalar_one()
    some = TaskFilter([status])
    for chosen in (
        replace(some, type="a"),
        replace(some, queue="fast"),
        replace(some, partition_key="k"),
        replace(some, error_text="no such FILE"),
        replace(some, error_text="x%"),
        replace(some, error_fingerprint=fingerprint),
        replace(some, type="a", error_fingerprint=fingerprint),
        replace(some, until=BEGIN + timedelta(seconds=6)),
        replace(some, ids=[id_, uuid.uuid4()]),
        replace(some, type="a", error_code="timeout"),
    ):
        assert [each.task_id for each in find(chosen).tasks] == [id_], chosen
        assert find(replace(chosen, statuses=set(TaskStatus) - {status})).tasks == [], chosen
    assert find(replace(some, ids=[])).tasks == []
    assert len(find(replace(some, since=BEGIN + timedelta(seconds=6))).tasks) == 1
    assert find(replace(some, error_text="x_")).tasks == [], "no character is a wildcard"


def test_times_are_those_of_the_last_change_and_partition_keys_are_shown(mixed: list[FoundTask]) -> None:
    assert mixed == sorted(mixed, key=place_of, reverse=True)
    assert all((each.finished_at is not None) == (each.status in FINAL) for each in mixed)
    assert {each.partition_key for each in mixed} == {None, "k0", "k1"}


def test_a_key_finds_its_task_of_each_type_also_if_it_was_given_to_the_api(stack: ServersOfTests) -> None:
    make_token("ann", Scope.TASKS_SUBMIT)
    registered(handler_of("mail.send"))
    (direct,) = submitted(1, key="order 7")
    (other,) = submitted(1, key="order 7", type="mail.send")
    (by_api,) = submitted(1, key="ann:order 7")
    (foreign,) = submitted(1, key="eve:order 7")
    with engine().connect() as connection:
        types = known_types(connection)
        assert set(ids_with_key(connection, "order 7", types)) == {direct, other, by_api}
        assert ids_with_key(connection, "order 7", ["mail.send"]) == [other]
        assert ids_with_key(connection, "eve:order 7", types) == [foreign]
        assert ids_with_key(connection, "order 8", types) == []
        assert ids_with_key(connection, "order 7", []) == []


def test_a_task_that_has_the_id_of_a_key_by_chance_is_not_found_by_the_key(stack: ServersOfTests) -> None:
    (id_,) = buried(1)
    with engine().begin() as connection:
        connection.execute(
            sql("UPDATE ledger.ingest_task SET id = :new WHERE id = :old"),
            {"old": id_, "new": keyed_id("demo.flaky", "order 7")},
        )
        assert ids_with_key(connection, "order 7", ["demo.flaky"]) == []


def test_known_types_are_those_of_workers_and_of_tasks_that_wait(stack: ServersOfTests) -> None:
    registered(handler_of("type.of.worker"))
    with engine().begin() as connection:
        insert(connection, TaskStatus.QUEUED, 0, type="type.that.waits")
        insert(connection, TaskStatus.RETRYING, 0, type="type.that.retries")
        found = known_types(connection)
    assert {"type.of.worker", "type.that.waits", "type.that.retries"} <= set(found)
    assert found == sorted(set(found))


def test_a_ledger_with_more_types_than_anyone_has_does_not_make_each_search_slow(stack: ServersOfTests) -> None:
    with engine().begin() as connection:
        connection.execute(
            sql("INSERT INTO ledger.ingest_task (id, type, queue, payload) "
                "SELECT gen_random_uuid(), 't' || n, 'q', '{}' FROM generate_series(1, 1500) AS n")
        )  # fmt: skip
        assert len(known_types(connection)) < 1200
        types = (f"t{number}" for number in range(100_000))
        assert ids_with_key(connection, "order 7", types) == []
        assert next(types) < "t3", "no id is computed that is not looked up"
