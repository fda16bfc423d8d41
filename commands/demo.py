"""demo: half a minute in which things are broken on purpose."""

from __future__ import annotations

from typing import Annotated

import typer

from commands.output import camel, console, print_json


def register(app: typer.Typer) -> None:
    app.command()(demo)


def demo(
    count: Annotated[int, typer.Option(min=50, max=100_000, help="Tasks.")] = 500,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run tasks on servers of its own while a worker is killed and the broker forgets everything; count the effects.

    Example: `manage.py demo --count 500`
    """
    from chaos.demo import demo as run  # noqa: PLC0415 - loads everything

    counted = run((lambda _: None) if as_json else (lambda what: console.print(f"· {what}")), count=count)
    if as_json:
        print_json(camel(counted))
    else:
        console.print(
            f"submitted {counted.submitted} = succeeded {counted.succeeded} = effects {counted.effects}", style="bold"
        )
        console.print(
            f"refused: {counted.duplicates} duplicate deliveries, {counted.late} late writes of lost workers;"
            f" {counted.taken_over} tasks were taken over or given back"
        )
    if not counted.is_right:
        raise typer.Exit(1)
