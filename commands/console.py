"""console link: print a link that logs a browser in once."""

# ruff: noqa: PLC0415 - SQLAlchemy loads slowly

from __future__ import annotations

from typing import Annotated

import typer

from commands.complaint import complain
from commands.options import Json
from commands.output import print_json


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        no_args_is_help=True,
        help="Log in to the web console: print a link that works once.\n\nExample: `manage.py console link`",
    )
    group.callback()(_group)
    group.command()(link)
    app.add_typer(group, name="console")


def _group() -> None:
    pass


def link(
    *,
    token: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Log in as this token of the API. Default: the token `console`, which may use every page.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print a link that logs a browser in to the console once, within ten minutes.

    A session lasts twelve hours, and ends at once when its token is revoked: `manage.py token revoke console`.

    Example: `manage.py console link --token ann`
    """
    import settings
    from console.links import new_link
    from console.sessions import LINK_MINUTES

    address = new_link(settings.current(), token)
    if as_json:
        print_json({"link": address, "validMinutes": LINK_MINUTES})
        return
    print(address)  # alone on stdout, so that a script can open it
    complain(f"This link logs in once, within {LINK_MINUTES} minutes.")
