"""config: every setting, its value and where it comes from; also the page docs/configuration.md."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Annotated, Any, Final, get_args, get_origin

import typer
from pydantic import SecretStr

import settings
from commands.output import print_json, print_table

PAGE_HEAD: Final = """# Configuration

Every setting is an environment variable. This page is made from `settings.py` by `make docs`; a test fails when it is
stale. `manage.py config` prints the values in force and where each comes from. The canonical name wins over the seed's.
A value that cannot be read stops the start with a sentence that names the variable.

| Variable | Default | Meaning | Also read from |
|---|---|---|---|
"""
PAGE_FOOT: Final = """
## Read by others

| Variable | Meaning |
|---|---|
| `FLOWER_BASIC_AUTH`, `FLOWER_ADDRESS`, … | Flower's own options. Without them: loopback, and the generated login |
| `REMAP_SIGTERM` | Celery's. Without it: `SIGQUIT`, so that SIGTERM gives messages in hand back at once |
| `PROMETHEUS_MULTIPROC_DIR` | prometheus_client's. Without it: a folder of its own for each program |
| `FAILPOINTS`, `FAILPOINT_TRACE` | tests only, see `failpoint.py` |
| `AMQP_URL`, `TEST_DATABASE_URL` | tests only: a RabbitMQ and another PostgreSQL for the matrix |
"""


def register(app: typer.Typer) -> None:
    app.command()(config)


def config(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page docs/configuration.md.")] = False,
) -> None:
    """Print every setting in force. Passwords are not shown.

    Example: `manage.py config | grep OUTBOX`
    """
    if markdown:
        print(configuration_page(), end="")
        return
    rows = list(_values())
    if as_json:
        print_json([{"name": name, "value": value, "source": source} for name, value, source in rows])
    else:
        print_table(("setting", "value", "from"), rows)


def configuration_page() -> str:
    lines = []
    for field, about in settings.Settings.model_fields.items():
        name, *aliases = settings.variables(field)
        choices = get_args(about.annotation) if get_origin(about.annotation) is not None else ()
        words = [f"`{choice}`" for choice in choices if isinstance(choice, str)]
        meaning = f"{about.description}" + (f" ({', '.join(words)})" if words else "")
        lines.append(f"| `{name}` | {_shown(about.default)} | {meaning} | {', '.join(f'`{a}`' for a in aliases)} |")
    return PAGE_HEAD + "\n".join(lines) + "\n" + PAGE_FOOT


def _values() -> Iterator[tuple[str, str, str]]:
    current = settings.current()
    for field in settings.Settings.model_fields:
        names = settings.variables(field)
        source = next((name for name in names if name in os.environ), "default")
        value = getattr(current, field)
        if names[0] in settings.SERVER_VARIABLES and not current.given(names[0]):
            value = current.stack.get(names[0], "")
            source = "stack" if value else "nothing"
        yield names[0], _masked(value), source


def _masked(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(value)
    if isinstance(value, dict):
        return ", ".join(f"{name}={_masked(part)}" for name, part in value.items())
    without_login = re.sub(r"(://[^:/@]*):[^/]*@", r"\1:***@", str(value))
    return re.sub(r"(?i)((?:password|passwd|secret|token|key)=)[^&]*", r"\1***", without_login)


def _shown(default: Any) -> str:
    if isinstance(default, SecretStr) or default in ("", (), None, {}):
        return "empty"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"
