"""drill: take a part of the development stack away, and show that nothing is lost."""

from __future__ import annotations

from typing import Annotated

import typer

from commands.confirmation import confirm
from commands.options import Json
from commands.output import camel, console, print_json


def register(app: typer.Typer) -> None:
    app.command()(drill)


def drill(
    part: Annotated[str, typer.Argument(metavar="postgres|broker|destination", help="What to take away.")],
    seconds: Annotated[float, typer.Option(min=1, max=300, help="How long it stays away.")] = 10.0,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Take a part of the running development stack away, show what waits, bring it back, and print what was kept.

    It needs the stack that `make start` has started, and does nothing if DATABASE_URL or BROKER_URL is set.

    Example: `manage.py drill postgres --seconds 10 --yes`
    """
    from chaos import drill as drills  # noqa: PLC0415 - loads everything

    try:
        chosen = drills.Part(part)
    except ValueError:
        raise typer.BadParameter(f"{part!r} is not one of {', '.join(drills.Part)}.") from None
    if not yes:
        confirm(f"Stop {chosen.subject} for {seconds:g} s?", remedy="add --yes to perform the drill.", as_json=as_json)
    found = drills.drill(chosen, seconds=seconds, say=(lambda _: None) if as_json else _say)
    if as_json:
        print_json({**camel(found), "isRight": found.is_right})
    else:
        console.print(found.sentences(), style="bold")
    if not found.is_right:
        raise typer.Exit(1)


def _say(step: str) -> None:
    console.print(f"· {step}")
