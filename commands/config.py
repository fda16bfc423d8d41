"""config: print every setting, its value and its source; also generate pages of docs/."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Annotated, Any, Final, get_args, get_origin

import typer
from pydantic import SecretStr

import settings
from commands.messages import messages_page
from commands.metrics_page import metrics_page
from commands.options import Json
from commands.output import print_json, print_table

PAGE_HEAD: Final = """# Configuration

Every setting is an environment variable. `manage.py config` prints the current values and the source of each one.
If a variable and one of its aliases (last column) are both set, the variable wins. An invalid value stops the program
at start with a message that names the variable.

`make docs` generates this page from `settings.py`; a test fails if the page is out of date.

| Variable | Default | Meaning | Alias |
|---|---|---|---|
"""
PAGE_FOOT: Final = """
## Variables of other programs and of the tests

| Variable | Meaning |
|---|---|
| `FLOWER_BASIC_AUTH`, `FLOWER_ADDRESS`, … | Flower's own options. Default: loopback only, with the generated login |
| `REMAP_SIGTERM` | Celery's own. With `SIGQUIT` (set in the stack and the image), SIGTERM releases tasks at once |
| `PROMETHEUS_MULTIPROC_DIR` | prometheus_client's own. Default: a new folder for each program |
| `FAILPOINTS`, `FAILPOINT_TRACE` | Tests only: see `failpoint.py` |
| `AMQP_URL`, `TEST_DATABASE_URL` | Tests only: a RabbitMQ, and a second version of PostgreSQL |
"""


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
    for wanted, page in ((markdown, configuration_page), (messages, messages_page), (metrics, metrics_page)):
        if wanted:
            print(page(), end="")
            return
    rows = list(_current_values())
    if as_json:
        print_json([{"name": name, "value": value, "source": source} for name, value, source in rows])
    else:
        print_table(("setting", "value", "from"), rows)


def configuration_page() -> str:
    """Return the text of docs/configuration.md."""
    lines = []
    for field, about in settings.Settings.model_fields.items():
        name, *aliases = settings.variables(field)
        choices = get_args(about.annotation) if get_origin(about.annotation) is not None else ()
        words = [f"`{choice}`" for choice in choices if isinstance(choice, str)]
        meaning = f"{about.description}" + (f" ({', '.join(words)})" if words else "")
        also = ", ".join(f"`{alias}`" for alias in aliases)
        lines.append(f"| `{name}` | {_describe_default(about.default)} | {meaning} | {also} |")
    return PAGE_HEAD + "\n".join(lines) + "\n" + PAGE_FOOT


def _current_values() -> Iterator[tuple[str, str, str]]:
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


def _describe_default(default: Any) -> str:
    if isinstance(default, SecretStr) or default in ("", (), None, {}):
        return "empty"
    text = ", ".join(default) if isinstance(default, tuple) else str(default)
    return f"`{text.lower() if isinstance(default, bool) else text}`"
