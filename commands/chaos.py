"""chaos: let processes die on purpose, on temporary servers, and count the effects."""

# ruff: noqa: PLC0415 - it loads every package

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from commands.complaint import complain
from commands.options import Json
from commands.output import camel, console, on_stderr, print_json, print_table

if TYPE_CHECKING:
    from chaos.sinks import Result

HELP: Final = """Let processes die on purpose, on temporary servers, and count the effects.

Example: `manage.py chaos sinks --crashes 1000`
"""
BugName = Literal["fence_dropped", "ack_before_commit", "gid_reused", "dedup_after_effect", "decision_after_commit"]


def register(app: typer.Typer) -> None:
    chaos = typer.Typer(no_args_is_help=True, help=HELP)
    chaos.callback()(lambda: None)
    chaos.command()(sinks)
    app.add_typer(chaos, name="chaos")


def sinks(
    *,
    crashes: Annotated[int, typer.Option(min=100, help="How many processes die.")] = 10_000,
    seed: Annotated[
        int | None, typer.Option(help="A number that makes the choices of a run repeatable; random by default.")
    ] = None,
    bug: Annotated[
        BugName | None, typer.Option(help="Run with this bug on purpose, to show that the run finds it.")
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a table of sinks and windows, as in docs/exactly-once.md.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Kill workers and recoveries at every place where an effect could be lost or doubled, for every kind of sink.

    Some workers are suspended until another one has their task, and go on too late. At the end, every task must
    have one effect in each of its sinks. The exit code is 1 otherwise. On two cores, 10,000 take about seven minutes.

    Example: `manage.py chaos sinks --crashes 1000 --seed 7`
    """
    from rich.progress import Progress

    from chaos.sink_bugs import Bug
    from chaos.sinks import chaos_sinks

    number = random.randrange(2**32) if seed is None else seed  # noqa: S311 - not a secret
    with Progress(console=on_stderr, transient=True, disable=as_json or not on_stderr.is_terminal) as progress:
        bar = progress.add_task("processes that have died", total=crashes)
        found = chaos_sinks(
            crashes,
            seed=number,
            bug=Bug(bug) if bug else None,
            report=lambda done: progress.update(bar, completed=done),
        )
    if as_json:
        print_json({**camel(found), "counted": camel(found.counted)})
    elif markdown:
        print(matrix(found.hits))
    else:
        _print(found)
    if found.violations:
        raise typer.Exit(1)


def matrix(hits: Mapping[str, int]) -> str:
    """Return a table: how often a process was killed at each window, for each kind of sink."""
    counts: dict[str, Counter[str]] = {}
    for name, times in hits.items():
        kind, _, window = name.partition(": ")
        counts.setdefault(window.partition(" (pass")[0], Counter())[kind] += times
    kinds = sorted({kind for count in counts.values() for kind in count})
    lines = [("killed at", *kinds), ("---",) * (len(kinds) + 1)]
    for window, count in sorted(counts.items()):
        lines.append((window, *(f"{count[kind]:,}" if count[kind] else "" for kind in kinds)))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _print(found: Result) -> None:
    counted = found.counted
    print_table(("killed at", "times"), [(where, f"{times:,}") for where, times in sorted(found.hits.items())])
    console.print()
    console.print(
        f"{found.crashes:,} processes died in {found.seconds:.0f} s (--seed {found.seed}); {found.suspended:,} workers"
        f" were suspended until another one had their task, and {counted.refused:,} late writes were refused."
    )
    console.print(
        f"{counted.tasks:,} tasks, {counted.effects:,} effects: {len(counted.lost)} lost,"
        f" {len(counted.doubled)} doubled, {len(counted.left_behind)} prepared transactions, locks or files left.",
        style="bold",
    )
    for violation in found.violations:
        complain(violation)
