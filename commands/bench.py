"""bench: measure, in one run, beside peers and the raw limit."""

from __future__ import annotations

from typing import Annotated

import typer

from commands.output import console, print_json, print_table


def register(app: typer.Typer) -> None:
    bench = typer.Typer(no_args_is_help=True, help="Measure, beside peers and the raw limit, on servers of its own.")
    bench.callback()(lambda: None)
    bench.command()(outbox)
    app.add_typer(bench, name="bench")


def outbox(
    count: Annotated[int, typer.Option(min=1000, help="Events for the relays.")] = 20_000,
    singles: Annotated[int, typer.Option(min=100, help="Single events for the latency.")] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """The relay beside the textbook's and its own bare statements; a single event beside `.delay()`.

    Example: `manage.py bench outbox --count 20000`
    """
    from bench.outbox import measure  # noqa: PLC0415 - loads everything
    from bench.scratch import scratch_servers  # noqa: PLC0415

    with console.status("starting servers …") as progress, scratch_servers() as settings:
        found = measure(settings, count=count, singles=singles, tell=lambda what: progress.update(f"{what} …"))
    if as_json:
        print_json(found)
        return
    print_table(
        ("relay to the Celery queue", "events/s", "ratio"),
        [
            ("textbook, one row at a time", f"{found.textbook:,.0f}", f"ours is {found.times_textbook:.1f}×"),
            ("bare statements", f"{found.bare:,.0f}", f"ours is {found.share_of_bare:.0%}"),
            ("ours", f"{found.ours:,.0f}", ""),
        ],
    )
    console.print()
    print_table(
        ("one event, until the message can be popped", "p50 ms", "p99 ms"),
        [
            ("plain .delay()", f"{found.delay_p50_ms:.1f}", f"{found.delay_p99_ms:.1f}"),
            ("outbox.add, from its COMMIT", f"{found.add_p50_ms:.1f}", f"{found.add_p99_ms:.1f}"),
        ],
    )
