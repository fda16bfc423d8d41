"""Prepared statements survive rollbacks, interruptions, changed tables and lost connections."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

import settings
from models.engine import autocommit, make_engine
from models.prepared_statements import Prepared
from tests.servers import ServersOfTests
from tests.tasks.deliveries import watching

COUNT = Prepared("SELECT count(*) + CAST(:more AS integer) FROM public.prepared_things WHERE name <> '50%'")
NAMES = text("SELECT count(*) FROM pg_prepared_statements WHERE name LIKE 'celeriac%'")


class Struck(Exception):
    """Stands for a time limit, which may strike anywhere."""


@pytest.fixture
def engine(stack: ServersOfTests, database: str) -> Iterator[Engine]:
    made = make_engine(database)
    with made.begin() as connection:
        connection.execute(text("CREATE TABLE public.prepared_things (name text)"))
    yield made
    with made.begin() as connection:
        connection.execute(text("DROP TABLE public.prepared_things"))
    made.dispose()


def count(connection: Connection, more: int = 0) -> int:
    return int(COUNT.execute(connection, {"more": more}).scalar_one())


def test_a_rollback_does_not_drop_a_prepared_statement(engine: Engine) -> None:
    with engine.connect() as connection:
        connection.execute(text("INSERT INTO public.prepared_things VALUES ('undone')"))
        with connection.begin_nested() as savepoint:
            assert count(connection, 1) == 2
            savepoint.rollback()
        connection.rollback()
        assert (count(connection, 1), count(connection, 2)) == (1, 2)
        assert connection.execute(NAMES).scalar_one() == 1


def test_nothing_is_prepared_if_the_setting_forbids_it(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """PgBouncer in transaction mode would send the next statement to a connection that does not know it."""
    monkeypatch.setenv("LEDGER_PREPARED_STATEMENTS", "false")
    settings.current.cache_clear()
    with engine.connect() as connection:
        assert (count(connection, 1), count(connection, 2)) == (1, 2)
        assert connection.execute(NAMES).scalar_one() == 0


def test_a_statement_that_could_not_be_prepared_in_a_failed_transaction_is_prepared_in_the_next(engine: Engine) -> None:
    with engine.connect() as connection:
        with pytest.raises(DBAPIError):
            connection.execute(text("SELECT 1 / 0"))
        with pytest.raises(DBAPIError, match="aborted"):
            count(connection)
        connection.rollback()
        assert count(connection, 3) == 3


def test_an_interruption_right_after_prepare_does_not_block_the_statement(engine: Engine) -> None:
    """The server has the statement, but the client has not noted its name: using that name again would fail."""

    def strike(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("PREPARE"):
            raise Struck

    with engine.connect() as connection:
        with watching(connection, "after_cursor_execute", strike), pytest.raises(Struck):
            count(connection)
        connection.rollback()
        assert count(connection, 4) == 4


def test_a_changed_table_or_a_lost_connection_causes_no_error(engine: Engine) -> None:
    for change in ("ADD COLUMN more integer", "DROP COLUMN more", "ALTER COLUMN name TYPE varchar(100)"):
        with engine.begin() as connection:
            connection.execute(text(f"ALTER TABLE public.prepared_things {change}"))
            assert count(connection, 5) == 5
        with engine.connect() as connection, pytest.raises(DBAPIError):
            connection.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))
        with engine.begin() as connection:
            assert count(connection, 6) == 6


def test_threads_do_not_mix_up_the_statements_of_their_connections(engine: Engine) -> None:
    def ask(number: int) -> int:
        with autocommit(engine) if number % 2 else engine.connect() as connection:
            return count(connection, number)

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(ask, range(200))) == list(range(200))


NAMED = Prepared("SELECT name FROM public.prepared_things LIMIT CAST(:most AS integer)")


@pytest.mark.parametrize("asks", [Prepared.row, Prepared.rows], ids=["row", "rows"])
@pytest.mark.parametrize("stale", ["DEALLOCATE ALL", "ALTER TABLE public.prepared_things ALTER name TYPE char(9)"])
def test_a_stale_plan_is_prepared_again(stale: str, asks: Any, engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO public.prepared_things VALUES ('a thing')"))
    with autocommit(engine) as connection:
        before = asks(NAMED, connection, {"most": 1})
        connection.execute(text(stale))
        after = asks(NAMED, connection, {"most": 1})
    assert "a thing" in str(before)
    assert "a thing" in str(after)


def test_a_dropped_plan_fails_only_the_transaction_that_notices_it(engine: Engine) -> None:
    with engine.connect() as connection:
        assert count(connection, 1) == 1
        connection.execute(text("DEALLOCATE ALL"))
        with pytest.raises(DBAPIError):
            count(connection)
        connection.rollback()
        assert count(connection, 2) == 2
