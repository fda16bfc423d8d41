"""token: create, list and revoke API tokens."""

# ruff: noqa: PLC0415 - SQLAlchemy loads slowly

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import typer

from commands import times
from commands.complaint import complain
from commands.options import Json
from commands.output import camel, console, format_time, print_json
from commands.plain_lines import print_lines

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Principal of the token: tasks and idempotency keys belong to this name.")
]


def register(app: typer.Typer) -> None:
    token = typer.Typer(
        no_args_is_help=True,
        help="Create, list and revoke API tokens.\n\nExample: `manage.py token create ci --scope tasks:submit`",
    )
    token.command()(create)
    token.command("list")(list_)
    token.command()(revoke)
    app.add_typer(token, name="token")


def create(
    name: Name,
    *,
    scope: Annotated[
        list[str] | None, typer.Option(help="What the token may do; repeat the option for several scopes.")
    ] = None,
    type: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Type of task that tasks:submit covers, such as 'invoice.*'; repeat the option for several. "
            "Default: every type without a scope of its own.",
        ),
    ] = None,
    expires_in: Annotated[
        timedelta | None,
        typer.Option(
            parser=times.parse_duration,
            metavar="DURATION",
            help="Lifetime, such as 90s, 2h or 30d. Default: the token does not expire.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Create a token and print it. It cannot be shown again: only its hash is stored.

    Scopes: tasks:submit, tasks:read (its own tasks), tasks:read-all, workflows:submit, documents:write, documents:read,
    http:request, chat, operate (details of errors). The types workflow.execute, document.ingest and http.request need
    the scopes workflows:submit, documents:write and http:request, too.

    Example: `manage.py token create billing --scope tasks:submit --type 'invoice.*' --expires-in 30d`
    """
    from api import tokens
    from models.engine import engine

    with engine().begin() as connection:
        token, expires_at = tokens.create(connection, name, scopes=scope or (), types=type or (), expires_in=expires_in)
    if as_json:
        shown = {"scopes": sorted(set(scope or ())), "types": sorted(set(type or ()))}
        print_json({"name": name, "token": token, **shown, "expiresAt": expires_at})
        return
    print(token)  # alone on stdout, so that TOKEN=$(manage.py token create …) works
    complain(f"This is the token of {name}. Copy it now; it cannot be shown again.")


def list_(*, as_json: Json = False) -> None:
    """List all tokens, without their secrets.

    Example: `manage.py token list --json`
    """
    from api import tokens
    from models.engine import engine

    with engine().connect() as connection:
        found = tokens.list_tokens(connection)
    if as_json:
        print_json([camel(each) for each in found])
        return
    print_lines(
        ("name", "state", "scopes", "types", "created (UTC)", "expires (UTC)", "last used (UTC)"),
        [
            (
                each.name,
                each.state,
                " ".join(each.scopes),
                " ".join(each.types),
                format_time(each.created_at),
                format_time(each.expires_at),
                format_time(each.last_used_at),
            )
            for each in found
        ],
    )


def revoke(name: Name) -> None:
    """Revoke a token: it is rejected from now on. Its name can be used for a new token.

    Example: `manage.py token revoke ci`
    """
    from api import tokens
    from models.engine import engine

    with engine().begin() as connection:
        tokens.revoke(connection, name)
    console.print(f"Revoked {name}.", markup=False)
