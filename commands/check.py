"""check: report what is wrong with servers, schema, workers and settings."""

# ruff: noqa: PLC0415 - settings, SQLAlchemy and Celery load slowly

from __future__ import annotations

from typing import Final

import typer

from commands.options import Json
from commands.output import console, print_json

COLOURS: Final = {"ok": "green", "warn": "yellow", "fail": "red"}


def register(app: typer.Typer) -> None:
    app.command()(check)


def check(as_json: Json = False) -> None:
    """Check servers, schema, durability, clocks, workers and beat, and say how to fix what is wrong.

    The exit code is 1 if a check failed.

    Example: `manage.py check --json | jq '.[] | select(.level != "ok")'`
    """
    import checks
    import settings

    findings = []
    for finding in checks.run_checks(settings.current()):
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
