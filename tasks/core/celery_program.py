"""Starting the `celery` program: its errors and its broker address. For Flower see `flower.py`.

Celery offers no hook before it imports the application, so `tasks/celery.py` and `celeryconfig.py` call these
functions. They act only inside the `celery` program; an application that imports us is left alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import settings
from models.errors import CeleriacError

SIGTERM_WARNING = (
    "SIGTERM lets this worker finish what it runs, however long that takes. Start it with REMAP_SIGTERM=SIGQUIT to make"
    " SIGTERM release its tasks within seconds."
)


def is_celery_program() -> bool:
    """Return True for `celery …` and `python -m celery …`, False for a program that merely imports us."""
    path = Path(sys.argv[0])
    return path.name == "celery" or path.parts[-2:] == ("celery", "__main__.py")


@contextmanager
def exit_with_message() -> Iterator[None]:
    """Print an error of ours as one line and exit with its code, if this is the `celery` program."""
    try:
        yield
    except (settings.SettingsError, CeleriacError) as error:
        if not is_celery_program():
            raise
        print(f"celery: {error.message}", file=sys.stderr)  # noqa: T201
        raise SystemExit(error.exit_code) from None


def broker_url() -> str:
    """Return the address given with `-b`, else BROKER_URL, else the running stack's.

    Celery passes `-b` on in CELERY_BROKER_URL. Without `-b` it copies BROKER_URL there: an address that `manage.py env`
    printed before a restart would then win over the running stack.
    """
    current = settings.current()
    typed = os.environ.get("CELERY_BROKER_URL", "")
    if typed and typed != os.environ.get("BROKER_URL"):
        return typed
    if is_celery_program():
        os.environ.pop("CELERY_BROKER_URL", None)  # it would win over every setting
    return current.broker_url
