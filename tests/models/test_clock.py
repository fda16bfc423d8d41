"""The ledger's clock: tests move it for all processes, services cannot, and the planner treats it as a constant."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, make_url
from sqlalchemy.exc import IntegrityError, ProgrammingError

from models.engine import make_engine
from models.sql import sql
from tasks.core.due_times import DUE_AT
from tests.models.moving_clock import move_clock
from tests.servers import Cluster


@pytest.fixture
def superuser(postgres: Cluster, database: str) -> Iterator[Engine]:
    engine = make_engine(postgres.superuser_url(str(make_url(database).database)))
    yield engine
    with engine.begin() as connection:
        connection.execute(sql("TRUNCATE ledger.ledger_clock"))
    engine.dispose()


def clock_shift(engine: Engine) -> timedelta:
    with engine.connect() as connection:
        shift: timedelta = connection.scalar(sql("SELECT ledger.ledger_now() - clock_timestamp()"))
    return shift


def test_without_a_shift_the_clock_is_the_servers(owner: Engine) -> None:
    assert abs(clock_shift(owner)) < timedelta(seconds=1)


def test_a_moved_clock_moves_for_every_connection_and_moves_add_up(owner: Engine, superuser: Engine) -> None:
    with owner.connect() as other:
        before: datetime = other.scalar(sql("SELECT ledger.ledger_now()"))
        other.commit()
        for _ in range(2):
            with superuser.begin() as connection:
                move_clock(connection, timedelta(hours=1))
        after: datetime = other.scalar(sql("SELECT ledger.ledger_now()"))
        stamped: datetime = other.scalar(
            sql("INSERT INTO ledger.outbox_event (destination, payload) VALUES ('x', '1') RETURNING created_at")
        )
    assert timedelta(hours=2) <= after - before < timedelta(hours=2, minutes=1)
    assert stamped >= after


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO ledger.ledger_clock (shift) VALUES ('1 hour')",
        "UPDATE ledger.ledger_clock SET shift = '1 hour'",
        "DELETE FROM ledger.ledger_clock",
        "TRUNCATE ledger.ledger_clock",
    ],
)
def test_the_owner_of_the_table_cannot_move_the_clock(owner: Engine, statement: str) -> None:
    with pytest.raises(ProgrammingError, match=r"Only a superuser .* may move the clock"), owner.begin() as connection:
        connection.execute(sql(statement))
    assert abs(clock_shift(owner)) < timedelta(seconds=1)


def test_there_can_be_only_one_shift(superuser: Engine) -> None:
    with pytest.raises(IntegrityError, match="ck_ledger_clock_only_row"), superuser.begin() as connection:
        connection.execute(sql("INSERT INTO ledger.ledger_clock (only_row) VALUES (true), (false)"))
    with pytest.raises(IntegrityError, match="pk_ledger_clock"), superuser.begin() as connection:
        connection.execute(sql("INSERT INTO ledger.ledger_clock (only_row) VALUES (true), (true)"))


def test_the_clock_does_not_depend_on_the_search_path_of_the_caller(owner: Engine) -> None:
    with owner.connect() as connection:
        connection.execute(sql("CREATE TEMP TABLE ledger_clock AS SELECT interval '9 years' AS shift"))
        connection.execute(sql("SET LOCAL search_path = pg_temp"))
        shift: timedelta = connection.scalar(sql("SELECT ledger.ledger_now() - clock_timestamp()"))
    assert abs(shift) < timedelta(seconds=1)


@pytest.mark.parametrize(
    ("index", "query"),
    [
        (
            "ix_ingest_task_due",
            "SELECT id FROM ledger.ingest_task WHERE queue = 'ingest' AND type = :name"
            f" AND status IN ('QUEUED', 'RETRYING') AND {DUE_AT} <= {{now}} ORDER BY queue, type, {DUE_AT} LIMIT 10",
        ),
        (
            "ix_outbox_event_unsent",
            "SELECT id FROM ledger.outbox_event WHERE destination = :name AND status IN ('NEW', 'RETRYING')"
            " AND ordering_key IS NULL"
            " AND coalesce(next_retry_at, '-infinity') <= {now}"
            " ORDER BY coalesce(next_retry_at, '-infinity'), id LIMIT 10",
        ),
    ],
    ids=["tasks", "outbox"],
)
@pytest.mark.parametrize("now", ["(SELECT ledger.ledger_now())", "ledger.ledger_now()"])
def test_a_query_for_due_rows_does_not_read_rows_that_are_due_later(
    owner: Engine, index: str, query: str, now: str
) -> None:
    own = {"name": f"clock {uuid.uuid4()}"}  # entries that earlier tests left in the index are not in its range
    with owner.connect() as connection:
        connection.execute(
            sql(
                "INSERT INTO ledger.ingest_task (id, type, payload, next_retry_at)"
                " SELECT gen_random_uuid(), :name, '{}', now() + interval '1 day' FROM generate_series(1, 5000)"
            ),
            own,
        )
        connection.execute(
            sql(
                "INSERT INTO ledger.outbox_event (destination, payload, next_retry_at)"
                " SELECT :name, '{}', now() + interval '1 day' FROM generate_series(1, 5000)"
            ),
            own,
        )
        connection.execute(sql("ANALYZE ledger.ingest_task, ledger.outbox_event"))
        explain = sql(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT json) {query.format(now=now)}")
        explained: Any = connection.scalar(explain, own)
    plan = explained if isinstance(explained, list) else json.loads(explained)
    scan = next(node for node in nodes(plan[0]["Plan"]) if node.get("Index Name") == index)
    assert "COALESCE(next_retry_at" in scan["Index Cond"]
    assert "Filter" not in scan
    assert scan["Shared Hit Blocks"] + scan["Shared Read Blocks"] < 10


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes(child)
