"""config: print every setting, its value and its source; also generate pages of docs/."""

# ruff: noqa: PLC0415 - settings and metrics load slowly

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from commands.options import Json
from commands.output import print_json, print_table


def register(app: typer.Typer) -> None:
    app.command()(config)


def config(
    as_json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page docs/configuration.md.")] = False,
    messages: Annotated[bool, typer.Option("--messages", help="Print the page docs/messages.md.")] = False,
    metrics: Annotated[bool, typer.Option("--metrics", help="Print the page docs/metrics.md.")] = False,
) -> None:
    """Print every setting, its value and its source. Passwords are not shown.

    Example: `manage.py config | grep OUTBOX`
    """
    if markdown:
        from commands.configuration_page import configuration_page

        print(configuration_page(), end="")
        return
    if messages:
        from commands.messages import messages_page

        print(messages_page(), end="")
        return
    if metrics:
        from commands.metrics_page import metrics_page

        print(metrics_page(), end="")
        return
    rows = list(_current_values())
    if as_json:
        print_json([{"name": name, "value": value, "source": source} for name, value, source in rows])
    else:
        print_table(("setting", "value", "from"), rows)


def _current_values() -> Iterator[tuple[str, str, str]]:
    import settings

    current = settings.current()
    for field in settings.Settings.model_fields:
        names = settings.variables(field)
        source = next((name for name in names if name in os.environ), "default")
        value = getattr(current, field)
        if names[0] in settings.SERVER_VARIABLES and not current.given(names[0]):
            value = current.stack.get(names[0], "")
            source = "stack" if value else "not set"
        yield names[0], _masked(value), source


def _masked(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(value)
    if isinstance(value, dict):
        return ", ".join(f"{name}={_masked(part)}" for name, part in value.items())
    without_login = re.sub(r"(://[^:/@]*):[^/]*@", r"\1:***@", str(value))
    return re.sub(r"(?i)((?:password|passwd|secret|token|key)=)[^&]*", r"\1***", without_login)
