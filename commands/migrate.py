"""migrate: create or upgrade the schema of the ledger."""

# ruff: noqa: PLC0415 - SQLAlchemy and Alembic load slowly

from __future__ import annotations

from typing import Annotated

import typer

from commands.options import Json
from commands.output import console, print_json


def register(app: typer.Typer) -> None:
    app.command()(migrate)


def migrate(
    revision: Annotated[
        str, typer.Argument(help="A revision. `head` is the latest; `base` drops all tables.")
    ] = "head",
    lock_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for a lock at most.")] = 10.0,
    yes: Annotated[bool, typer.Option("--yes", help="With `base`: do not ask before dropping all tables.")] = False,
    as_json: Json = False,
) -> None:
    """Migrate to the latest schema. Safe to run concurrently.

    Example: `manage.py migrate`
    """
    import settings
    from models.engine import make_engine
    from models.schema import migrate as migrate_schema

    if revision == "base" and not yes:
        typer.confirm("This drops every table of the ledger with all its data. Continue?", abort=True)
    after = migrate_schema(make_engine(settings.current().database_url), revision, lock_timeout_seconds=lock_timeout)
    if as_json:
        print_json({"revision": after})
    else:
        console.print(f"The schema is at {after or 'base'}.")
