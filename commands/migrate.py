"""migrate: the schema of the ledger."""

from __future__ import annotations

from typing import Annotated

import typer

import settings
from commands.output import console, print_json


def register(app: typer.Typer) -> None:
    app.command()(migrate)


def migrate(
    revision: Annotated[str, typer.Argument(help="A revision, `head` or `base`.")] = "head",
    lock_timeout: Annotated[float, typer.Option(min=0.1, help="Longest wait for a lock, in seconds.")] = 10.0,
    yes: Annotated[bool, typer.Option("--yes", help="With `base`: do not ask before all tables are dropped.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Bring the schema of the ledger to a revision. Safe to run twice at once.

    Example: `manage.py migrate`
    """
    from models.engine import make_engine  # noqa: PLC0415 - loads SQLAlchemy
    from models.schema import migrate as migrate_schema  # noqa: PLC0415

    if revision == "base" and not yes:
        typer.confirm("This drops every table of the ledger and all it knows. Go on?", abort=True)
    after = migrate_schema(make_engine(settings.current().database_url), revision, lock_timeout_seconds=lock_timeout)
    if as_json:
        print_json({"revision": after})
    else:
        console.print(f"The schema is at {after or 'base'}.")
