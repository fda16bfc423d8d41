"""The models define the same tables as the migration, including every CHECK and index."""

from __future__ import annotations

from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, Engine, text

import settings
from models.schema import migrate
from models.tables import Base

CATALOGUE = {
    "columns": """
        SELECT c.relname, a.attnum - (SELECT count(*) FROM pg_attribute d
                 WHERE d.attrelid = c.oid AND d.attisdropped AND d.attnum BETWEEN 1 AND a.attnum) AS place, a.attname,
               format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity, a.attgenerated, a.attcollation,
               a.attstorage, a.attcompression, pg_get_expr(d.adbin, d.adrelid)
        FROM ours c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
        LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum WHERE c.relkind = 'r'""",
    "constraints": """
        SELECT c.relname, k.conname, k.contype, k.convalidated, k.condeferrable, pg_get_constraintdef(k.oid)
        FROM pg_constraint k JOIN ours c ON c.oid = k.conrelid""",
    "indexes": """
        SELECT c.relname, pg_get_indexdef(i.indexrelid), i.indisunique, i.indisvalid, x.reloptions
        FROM pg_index i JOIN ours c ON c.oid = i.indrelid JOIN pg_class x ON x.oid = i.indexrelid""",
    "relations": "SELECT relname, relkind, relpersistence, reloptions, relacl FROM ours",
    "sequences": """
        SELECT c.relname, s.seqtypid::regtype::text, s.seqstart, s.seqincrement, s.seqmax, s.seqmin, s.seqcache,
               s.seqcycle
        FROM pg_sequence s JOIN ours c ON c.oid = s.seqrelid""",
}
CLOCK = """
    CREATE SCHEMA ledger;
    CREATE FUNCTION ledger.ledger_now() RETURNS timestamptz LANGUAGE sql STABLE RETURN clock_timestamp()
"""
OURS = """
    WITH ours AS (SELECT * FROM pg_class
                  WHERE relnamespace = 'ledger'::regnamespace AND relname !~ 'celeriac_version') """


def catalogue(connection: Connection) -> dict[str, list[Any]]:
    return {
        part: sorted((tuple(row) for row in connection.execute(text(OURS + query))), key=repr)
        for part, query in CATALOGUE.items()
    }


def test_the_models_define_the_same_tables_as_the_migration(empty: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are created in a schema named `ledger`, as in the models. Only the migration has functions and triggers."""
    monkeypatch.setenv("LEDGER_SCHEMA", "ledger")
    settings.current.cache_clear()
    with empty.begin() as connection:
        connection.execute(text(CLOCK))
        Base.metadata.create_all(connection)
        by_models = catalogue(connection)
        connection.execute(text("DROP SCHEMA ledger CASCADE"))
    migrate(empty)
    with empty.connect() as connection:
        by_migrations = catalogue(connection)
    for part in CATALOGUE:
        assert by_models[part] == by_migrations[part], part
        assert by_models[part], f"there are no {part} to compare"


def test_alembic_finds_no_difference(empty: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEDGER_SCHEMA", "ledger")
    settings.current.cache_clear()
    migrate(empty)
    with empty.connect() as connection:
        options = {
            "compare_type": True,
            "compare_server_default": True,
            "include_schemas": True,
            "version_table": "celeriac_version",
            "version_table_schema": "ledger",
        }
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, Base.metadata) == []
