"""sinks, recover: list sinks with their guarantees, prepare them, and finish transactions in doubt."""

# ruff: noqa: PLC0415 - SQLAlchemy loads slowly

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from commands.options import Json
from commands.output import console, format_duration, print_json, print_table

if TYPE_CHECKING:
    from tasks.operations.sink_list import SinkState

SINKS_HELP: Final = """List the sinks of SINKS: guarantee, conditions, health, and transactions in doubt.

Example: `manage.py sinks --json`
"""
PREPARE_HELP: Final = """Create what a sink needs in the other system, such as the table of a keyed PostgreSQL.

Safe to repeat.

Example: `manage.py sinks prepare billing`
"""


def register(app: typer.Typer) -> None:
    sinks = typer.Typer()
    sinks.callback(invoke_without_command=True, help=SINKS_HELP)(show)
    sinks.command("prepare", help=PREPARE_HELP)(prepare)
    app.add_typer(sinks, name="sinks")
    app.command()(recover)


def show(context: typer.Context, *, as_json: Json = False) -> None:
    from tasks.operations.sink_list import list_sinks

    if context.invoked_subcommand:
        return
    found = list_sinks()
    if as_json:
        print_json([_json_of(each) for each in found])
    elif not found:
        console.print("SINKS is empty. docs/exactly-once.md shows how to name a sink.", markup=False)
    else:
        _print(found)
    if any(not each.is_ready for each in found):
        raise typer.Exit(1)


def prepare(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the sink in SINKS.")], as_json: Json = False
) -> None:
    from sinks.configuration import open_sinks

    done = open_sinks().find(name).prepare()
    if as_json:
        print_json({"sink": name, "done": done})
    else:
        console.print(f"{name}: {done}")


def recover(as_json: Json = False) -> None:
    """Finish transactions in two-phase sinks that a lost worker has left. Beat does the same regularly.

    Example: `manage.py recover --json`
    """
    from dataclasses import asdict

    from models.engine import engine
    from sinks.recovery import recover as finish

    found = asdict(finish(engine(), retries_failed=True))
    if as_json:
        print_json(found)
    else:
        console.print(", ".join(f"{WORDS[name]}: {len(gids)}" for name, gids in found.items()))
        for gid in (*found["failed"], *found["unknown"]):
            console.print(gid, markup=False)
    if found["failed"] or found["unknown"]:
        raise typer.Exit(1)


WORDS: Final = {
    "committed": "committed",
    "aborted": "aborted",
    "left": "left for later",
    "failed": "failed",
    "unknown": "unknown to the ledger",
}


def _json_of(each: SinkState) -> dict[str, Any]:
    return {
        "name": each.name,
        "guarantee": each.guarantee,
        "ready": each.is_ready,
        "health": each.health,
        "conditions": each.conditions,
        "keyLifeSeconds": each.key_life.total_seconds() if each.key_life else None,
        "inDoubt": each.in_doubt,
        "oldestSeconds": each.oldest.total_seconds() if each.oldest else None,
    }


def _print(found: list[SinkState]) -> None:
    print_table(
        ("sink", "guarantee", "ready", "health", "in doubt", "oldest"),
        [
            (
                each.name,
                each.guarantee,
                "yes" if each.is_ready else "no",
                each.health,
                str(each.in_doubt),
                format_duration(each.oldest),
            )
            for each in found
        ],
    )
    console.print()
    print_table(
        ("sink", "the guarantee holds under these conditions"),
        [(each.name, condition) for each in found for condition in each.conditions],
    )
