"""An application with its own Alembic, tables and search_path shares its database with Celeriac without noticing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, create_engine, inspect, text
from sqlalchemy.orm import Session

from models.schema import head_revision, migrate
from models.sql import sql
from tasks import submit
from tests.servers import ServersOfTests

TABLES = ("document", "chat", "outbox_event", "checkpoint", "tick")
ENV = """
from alembic import context
connection = context.config.attributes["connection"]
context.configure(connection=connection)
with context.begin_transaction():
    context.run_migrations()
"""
REVISION = """
from alembic import op
revision = "{revision}"
down_revision = {down}
def upgrade():
    op.execute("{statement}")
"""


class Application:
    """An application with two migrations of its own, in `public`, through an engine of its own."""

    def __init__(self, url: str, folder: Path) -> None:
        self.engine: Engine = create_engine(url)
        self.config = Config()
        self.config.set_main_option("script_location", str(folder))
        (folder / "versions").mkdir()
        (folder / "env.py").write_text(ENV)
        tables = "; ".join(f"CREATE TABLE {name} (id integer PRIMARY KEY, note text)" for name in TABLES)
        self._add("a1", None, tables)
        self._add("a2", "a1", "CREATE TABLE invoice (id integer PRIMARY KEY)")

    def migrate(self, revision: str) -> None:
        with self.engine.begin() as connection:
            self.config.attributes["connection"] = connection
            command.upgrade(self.config, revision)

    @property
    def revision(self) -> str:
        with self.engine.connect() as connection:
            return str(connection.execute(text("SELECT version_num FROM public.alembic_version")).scalar_one())

    def _add(self, revision: str, down: str | None, statement: str) -> None:
        folder = Path(self.config.get_main_option("script_location") or "")
        text_ = REVISION.format(revision=revision, down=repr(down), statement=statement)
        (folder / "versions" / f"{revision}.py").write_text(text_)


@pytest.fixture
def application(empty_database: str, tmp_path: Path) -> Iterator[Application]:
    application = Application(empty_database, tmp_path)
    yield application
    application.engine.dispose()


def test_migrating_before_and_after_us_keeps_the_tables_and_the_version_of_an_application(
    empty: Engine, application: Application
) -> None:
    application.migrate("a1")
    assert migrate(empty) == head_revision()
    application.migrate("a2")
    assert (application.revision, migrate(empty)) == ("a2", head_revision())
    migrate(empty, "base")
    assert application.revision == "a2"
    for name in TABLES:
        assert [column["name"] for column in inspect(empty).get_columns(name, schema="public")] == ["id", "note"]


def test_an_application_that_migrates_after_us_does_not_find_our_version(
    empty: Engine, application: Application
) -> None:
    migrate(empty)
    application.migrate("a2")
    assert migrate(empty) == head_revision()
    assert set(TABLES) < set(inspect(empty).get_table_names(schema="celeriac"))
    assert set(inspect(empty).get_table_names(schema="public")) == {*TABLES, "invoice", "alembic_version"}


@pytest.mark.usefixtures("stack")
@pytest.mark.parametrize("search_path", ["public", "shop", "pg_catalog", "''"])
def test_a_submit_shares_the_transaction_of_an_application_with_any_search_path(
    search_path: str, empty: Engine, application: Application
) -> None:
    """Its rows and our task commit together or not at all, and its unqualified names still mean its own tables."""
    application.migrate("a2")
    migrate(empty)
    with Session(application.engine) as session:
        session.execute(text("CREATE SCHEMA shop"))
        session.execute(text(f"SET search_path = {search_path}"))
        session.execute(text("INSERT INTO public.outbox_event VALUES (1, 'mine')"))
        task = submit(session, "demo.flaky", {}, key="k", partition_key="p")
        session.rollback()
        assert not submit_is_stored(empty)
        session.execute(text(f"SET search_path = {search_path}"))
        session.execute(text("INSERT INTO public.outbox_event VALUES (2, 'mine')"))
        assert submit(session, "demo.flaky", {}, key="k", partition_key="p") == task
        session.commit()
        assert session.execute(text("SHOW search_path")).scalar_one() == search_path.replace("''", '""')
        assert session.execute(text("SELECT id FROM public.outbox_event")).scalars().all() == [2]
    assert submit_is_stored(empty)


def submit_is_stored(engine: Engine) -> bool:
    with engine.connect() as connection:
        counts = [connection.execute(sql(f"SELECT count(*) FROM ledger.{name}")).scalar_one() for name in OURS]
    assert len(set(counts)) == 1
    return bool(counts[0])


OURS = ("ingest_task", "ingest_task_transition", "outbox_event")


def test_the_sql_function_works_in_any_schema(stack: ServersOfTests) -> None:
    with stack.cluster.superuser.begin() as connection:
        for path in ("''", "public", "pg_catalog"):
            connection.execute(text(f"SET LOCAL search_path = {path}"))
            connection.execute(
                text("SELECT celeriac.ingest_submit('t', '{}', :key, partition_key => 'p')"), {"key": path}
            )
        assert connection.execute(sql("SELECT count(*) FROM ledger.ingest_task")).scalar_one() == 3
