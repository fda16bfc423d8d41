"""The page docs/configuration.md, generated from the settings themselves."""

from __future__ import annotations

from typing import Any, Final, get_args, get_origin

from pydantic import SecretStr

import settings

HEAD: Final = """# Configuration

Every setting is an environment variable. `manage.py config` prints the current values and the source of each one.
If a variable and one of its aliases (last column) are both set, the variable wins. An invalid value stops the program
at start with a message that names the variable.

`make docs` generates this page from `settings.py`; a test fails if the page is out of date.

| Variable | Default | Meaning | Alias |
|---|---|---|---|
"""
FOOT: Final = """
## Variables of other programs and of the tests

| Variable | Meaning |
|---|---|
| `FLOWER_BASIC_AUTH`, `FLOWER_ADDRESS`, … | Flower's own options. Default: loopback only, with the generated login |
| `REMAP_SIGTERM` | Celery's own. With `SIGQUIT` (set in the stack and the image), SIGTERM releases tasks at once |
| `PROMETHEUS_MULTIPROC_DIR` | prometheus_client's own. Default: a new folder for each program |
| `FAILPOINTS`, `FAILPOINT_TRACE` | Tests only: see `failpoint.py` |
| `AMQP_URL`, `TEST_DATABASE_URL` | Tests only: a RabbitMQ, and a second version of PostgreSQL |
"""


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
    return HEAD + "\n".join(lines) + "\n" + FOOT


def _describe_default(default: Any) -> str:
    if isinstance(default, SecretStr) or default in ("", (), None, {}):
        return "empty"
    text = ", ".join(default) if isinstance(default, tuple) else str(default)
    return f"`{text.lower() if isinstance(default, bool) else text}`"
