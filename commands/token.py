"""token: who may use the API, and for what."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Annotated

import typer

from commands import times
from commands.output import camel, complain, console, moment, print_json
from commands.plain_lines import print_lines

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Who it is for; tasks and keys belong to this name.")]


def register(app: typer.Typer) -> None:
    token = typer.Typer(
        no_args_is_help=True,
        help="Tokens of the API: create, list, revoke.\n\nExample: `manage.py token create ci --scope tasks:submit`",
    )
    token.command()(create)
    token.command("list")(list_)
    token.command()(revoke)
    app.add_typer(token, name="token")


def create(
    name: Name,
    *,
    scope: Annotated[list[str] | None, typer.Option(help="What it may do; may be given several times.")] = None,
    expires_in: Annotated[str | None, typer.Option(help="90s, 2h, 30d; without it: never.")] = None,
    as_json: Json = False,
) -> None:
    """Create a token and print it, this once: only its hash is kept.

    Scopes: tasks:submit, tasks:read (its own tasks), tasks:read-all, workflows:submit, documents:write, documents:read.

    Example: `manage.py token create ci --scope tasks:submit --scope tasks:read --expires-in 30d`
    """
    from api import tokens  # noqa: PLC0415
    from models.engine import engine  # noqa: PLC0415 - loads SQLAlchemy

    with engine().begin() as connection:
        token, expires_at = tokens.create(connection, name, scopes=scope or (), expires_in=_duration(expires_in))
    if as_json:
        print_json({"name": name, "token": token, "scopes": sorted(set(scope or ())), "expiresAt": expires_at})
        return
    print(token)  # alone on stdout, for TOKEN=$(manage.py token create …)
    complain(f"This is the token of {name}; nobody can be shown it again.")


def list_(*, as_json: Json = False) -> None:
    """List tokens, without their secrets.

    Example: `manage.py token list --json`
    """
    from api import tokens  # noqa: PLC0415
    from models.engine import engine  # noqa: PLC0415 - loads SQLAlchemy

    with engine().connect() as connection:
        found = tokens.listed(connection)
    if as_json:
        print_json([camel(each) for each in found])
        return
    print_lines(
        ("name", "state", "scopes", "created (UTC)", "expires (UTC)", "last used (UTC)"),
        [
            (
                each.name,
                each.state,
                " ".join(each.scopes),
                moment(each.created_at),
                moment(each.expires_at),
                moment(each.last_used_at),
            )
            for each in found
        ],
    )


def revoke(name: Name) -> None:
    """Revoke a token: from now on it is refused. Its name may be given to a new one.

    Example: `manage.py token revoke ci`
    """
    from api import tokens  # noqa: PLC0415
    from models.engine import engine  # noqa: PLC0415 - loads SQLAlchemy

    with engine().begin() as connection:
        tokens.revoke(connection, name)
    console.print(f"Revoked {name}.", markup=False)


def _duration(given: str | None) -> timedelta | None:
    if given is None:
        return None
    with suppress(typer.BadParameter):
        found = times.moment(given)
        if isinstance(found, timedelta):
            return found
    raise typer.BadParameter(f"{given!r} is not a duration: 90s, 2h, 30d.", param_hint="--expires-in")
