"""demo: break things on purpose for half a minute, and count the effects."""

from __future__ import annotations

from typing import Annotated

import typer

from commands.output import camel, console, print_json


def register(app: typer.Typer) -> None:
    app.command()(demo)


def demo(
    count: Annotated[int, typer.Option(min=50, max=100_000, help="How many tasks to run.")] = 500,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run tasks on temporary servers while a worker is killed and the broker loses its messages; count the effects.

    Example: `manage.py demo --count 500`
    """
    from chaos.demo import demo as run  # noqa: PLC0415 - loads everything
    from embedded.leftovers import leaving_nothing_behind  # noqa: PLC0415

    with leaving_nothing_behind():
        counts = run((lambda _: None) if as_json else (lambda step: console.print(f"· {step}")), count=count)
    if as_json:
        print_json(camel(counts))
    else:
        console.print(
            f"submitted {counts.submitted} = succeeded {counts.succeeded} = effects {counts.effects}", style="bold"
        )
        console.print(
            f"refused: {counts.duplicates} duplicate deliveries, {counts.late} late writes of lost workers;"
            f" run again: {counts.interrupted} interrupted tasks"
        )
    if not counts.is_right:
        raise typer.Exit(1)
