"""Migrating: there and back, twice at once, against a lock, and against a schema of the future."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, inspect

from models import schema
from models.engine import make_engine
from models.errors import LedgerBusy, Misuse, SchemaMismatch
from models.schema import head_revision, known_revisions, migrate
from models.sql import sql


@pytest.fixture
def empty(empty_database: str) -> Iterator[Engine]:
    engine = make_engine(empty_database)
    yield engine
    engine.dispose()


def leftovers(engine: Engine) -> list[str]:
    """What of ours is in the database: relations, functions, triggers."""
    with engine.connect() as connection:
        return list(
            connection.scalars(
                sql("""
                    SELECT relname FROM pg_class WHERE relnamespace = 'celeriac'::regnamespace AND relname !~ '^alembic'
                    UNION ALL SELECT proname FROM pg_proc WHERE pronamespace = 'celeriac'::regnamespace
                    UNION ALL SELECT tgname FROM pg_trigger
                """)
            )
        )


def test_an_empty_database_goes_to_head_and_back_and_to_head_again(empty: Engine) -> None:
    assert migrate(empty) == head_revision() == known_revisions()[-1]
    assert "ingest_task" in inspect(empty).get_table_names(schema="celeriac")
    assert migrate(empty, "base") is None
    assert leftovers(empty) == []
    assert migrate(empty) == head_revision()


def test_a_migration_that_has_nothing_to_do_does_nothing(empty: Engine) -> None:
    migrate(empty)
    with empty.connect() as connection:
        before = connection.scalar(sql("SELECT oid FROM pg_class WHERE relname = 'ingest_task'"))
    assert migrate(empty) == head_revision()
    with empty.connect() as connection:
        assert connection.scalar(sql("SELECT oid FROM pg_class WHERE relname = 'ingest_task'")) == before


def test_an_unknown_target_is_a_misuse(empty: Engine) -> None:
    with pytest.raises(Misuse, match="no revision 'abc'"):
        migrate(empty, "abc")


def test_migrations_that_start_at_once_all_end_at_head(empty: Engine) -> None:
    start = threading.Barrier(4)

    def one() -> str | None:
        start.wait()
        return migrate(empty)

    with ThreadPoolExecutor(4) as pool:
        results = [future.result() for future in [pool.submit(one) for _ in range(4)]]
    assert results == [head_revision()] * 4


def test_a_second_migration_waits_for_the_first_and_says_busy_instead_of_hanging(empty: Engine) -> None:
    with empty.connect() as other:
        other.execute(sql("SELECT pg_advisory_lock(:key)"), {"key": schema.MIGRATION_LOCK})
        with pytest.raises(LedgerBusy, match=r"not free within 0\.05 s"):
            migrate(empty, lock_timeout_seconds=0.05)
        other.execute(sql("SELECT pg_advisory_unlock_all()"))
    assert migrate(empty) == head_revision()


def test_a_long_transaction_on_a_table_makes_a_migration_busy_and_leaves_the_schema_as_it_was(empty: Engine) -> None:
    migrate(empty)
    with empty.begin() as other:
        other.execute(sql("SELECT 1 FROM ledger.ingest_task"))
        with pytest.raises(LedgerBusy):
            migrate(empty, "base", lock_timeout_seconds=0.05)
    assert "task_step" in inspect(empty).get_table_names(schema="celeriac")
    assert migrate(empty) == head_revision()


def test_a_migration_leaves_no_lock_and_no_timeout_in_the_pool(empty: Engine) -> None:
    migrate(empty, lock_timeout_seconds=0.5)
    with empty.connect() as connection:
        assert connection.scalar(sql("SHOW lock_timeout")) == "0"
        assert connection.scalar(sql("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")) == 0


@pytest.mark.parametrize("target", ["head", "base"])
def test_a_schema_newer_than_the_code_is_refused_in_both_directions(empty: Engine, target: str) -> None:
    migrate(empty)
    with empty.begin() as connection:
        connection.execute(sql("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(SchemaMismatch, match="9999, which this code does not know"):
        migrate(empty, target)
    assert "ingest_task" in inspect(empty).get_table_names(schema="celeriac")


def test_a_migration_that_did_not_commit_is_noticed(empty: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    walk = schema._walk

    def inside_a_transaction(connection: Connection, before: str | None, target: str | None) -> None:
        connection.begin()  # the trap: Alembic leaves the commit to whoever began
        walk(connection, before, target)

    monkeypatch.setattr(schema, "_walk", inside_a_transaction)
    with pytest.raises(SchemaMismatch, match="ended, but the database is at base"):
        migrate(empty)


def test_a_path_with_spaces_and_percent_signs_is_no_obstacle(
    empty: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "100 % of my %(here)s files" / "migrations"
    shutil.copytree(schema.MIGRATIONS, elsewhere)
    monkeypatch.setattr(schema, "MIGRATIONS", elsewhere)
    assert migrate(empty) == head_revision()
    assert migrate(empty, "base") is None
