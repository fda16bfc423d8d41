"""check: the doctor."""

from __future__ import annotations

from typing import Annotated, Final

import typer

import settings
from commands.output import console, print_json

COLOURS: Final = {"ok": "green", "warn": "yellow", "fail": "red"}


def register(app: typer.Typer) -> None:
    app.command()(check)


def check(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Look at servers, schema, durability, clocks, workers and beat, and say what to do. Exit 1 on a fail.

    Example: `manage.py check --json | jq '.[] | select(.level != "ok")'`
    """
    import checks  # noqa: PLC0415 - each command loads what it needs, so that the others answer at once

    findings = []
    for finding in checks.examine(settings.current()):
        findings.append(finding)
        if not as_json:
            colour = COLOURS[finding.level]
            console.print(f"[{colour}]{finding.level:<4}[/{colour}]  {finding.name:<36} ", end="")
            console.print(finding.message, markup=False)
            if finding.remedy:
                console.print(f"      → {finding.remedy}", markup=False)
    if as_json:
        print_json(findings)
    if any(finding.level == "fail" for finding in findings):
        raise typer.Exit(1)
