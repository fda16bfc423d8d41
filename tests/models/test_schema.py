"""Migrations: up and down, concurrently, while a lock is held, and with a schema newer than the code."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from sqlalchemy import Engine, inspect

from models import schema
from models.errors import LedgerBusy, Misuse, SchemaMismatch
from models.schema import head_revision, known_revisions, migrate
from models.sql import sql


def leftovers(engine: Engine) -> list[str]:
    """Return the names of our relations, functions and triggers in the database."""
    with engine.connect() as connection:
        return list(
            connection.scalars(
                sql("""
                    SELECT relname FROM pg_class
                    WHERE relnamespace = 'celeriac'::regnamespace AND relname !~ 'celeriac_version'
                    UNION ALL SELECT proname FROM pg_proc WHERE pronamespace = 'celeriac'::regnamespace
                    UNION ALL SELECT tgname FROM pg_trigger
                """)
            )
        )


def test_a_downgrade_removes_everything_and_an_upgrade_restores_it(empty: Engine) -> None:
    assert migrate(empty) == head_revision() == known_revisions()[-1]
    assert "ingest_task" in inspect(empty).get_table_names(schema="celeriac")
    assert migrate(empty, "base") is None
    assert leftovers(empty) == []
    assert migrate(empty) == head_revision()


def test_a_repeated_migration_changes_nothing(empty: Engine) -> None:
    migrate(empty)
    with empty.connect() as connection:
        before = connection.scalar(sql("SELECT oid FROM pg_class WHERE relname = 'ingest_task'"))
    assert migrate(empty) == head_revision()
    with empty.connect() as connection:
        assert connection.scalar(sql("SELECT oid FROM pg_class WHERE relname = 'ingest_task'")) == before


def test_an_unknown_revision_is_refused(empty: Engine) -> None:
    with pytest.raises(Misuse, match="no revision 'abc'"):
        migrate(empty, "abc")


def test_concurrent_migrations_all_end_at_head(empty: Engine) -> None:
    start = threading.Barrier(4)

    def one() -> str | None:
        start.wait()
        return migrate(empty)

    with ThreadPoolExecutor(4) as pool:
        results = [future.result() for future in [pool.submit(one) for _ in range(4)]]
    assert results == [head_revision()] * 4


def test_a_migration_does_not_wait_for_another_one_for_ever(empty: Engine) -> None:
    with empty.connect() as other:
        other.execute(schema.MIGRATION_LOCK, {"schema": "celeriac"})
        with pytest.raises(LedgerBusy, match=r"not free within 0\.05 s"):
            migrate(empty, lock_timeout_seconds=0.05)
        other.execute(sql("SELECT pg_advisory_unlock_all()"))
    assert migrate(empty) == head_revision()


def test_a_migration_gives_up_behind_a_long_transaction_and_changes_nothing(empty: Engine) -> None:
    migrate(empty)
    with empty.begin() as other:
        other.execute(sql("SELECT 1 FROM ledger.ingest_task"))
        with pytest.raises(LedgerBusy):
            migrate(empty, "base", lock_timeout_seconds=0.05)
    assert "task_step" in inspect(empty).get_table_names(schema="celeriac")
    assert migrate(empty) == head_revision()


def test_a_migration_leaves_no_lock_and_no_timeout_on_a_pooled_connection(empty: Engine) -> None:
    migrate(empty, lock_timeout_seconds=0.5)
    with empty.connect() as connection:
        assert connection.scalar(sql("SHOW lock_timeout")) == "0"
        assert connection.scalar(sql("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")) == 0


@pytest.mark.parametrize("target", ["head", "base"])
def test_a_schema_newer_than_the_code_is_refused_in_both_directions(empty: Engine, target: str) -> None:
    migrate(empty)
    with empty.begin() as connection:
        connection.execute(sql("UPDATE ledger.celeriac_version SET version_num = '9999'"))
    with pytest.raises(SchemaMismatch, match="9999, which this code does not know"):
        migrate(empty, target)
    assert "ingest_task" in inspect(empty).get_table_names(schema="celeriac")


def test_a_migration_that_did_not_commit_is_noticed(empty: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    upgrade = command.upgrade

    def upgrade_in_a_transaction(config: Any, revision: str) -> None:
        config.attributes["connection"].begin()  # Alembic does not commit a transaction that it did not begin
        upgrade(config, revision)

    monkeypatch.setattr(command, "upgrade", upgrade_in_a_transaction)
    with pytest.raises(SchemaMismatch, match="ended, but the database is at base"):
        migrate(empty)


def test_a_path_may_contain_spaces_and_percent_signs(
    empty: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "100 % of my %(here)s files" / "migrations"
    shutil.copytree(schema.MIGRATIONS, elsewhere)
    monkeypatch.setattr(schema, "MIGRATIONS", elsewhere)
    assert migrate(empty) == head_revision()
    assert migrate(empty, "base") is None
