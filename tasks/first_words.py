"""What the `celery` program says before there is an application: a sentence instead of a traceback.

Whoever typed `celery …` gets the sentence and the exit code of `models/errors.py`; whoever imported us gets the error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import settings
from models.errors import CeleriacError
from tasks.program import is_celery_program


@contextmanager
def a_sentence_for_whoever_typed() -> Iterator[None]:
    try:
        yield
    except (settings.SettingsError, CeleriacError) as error:
        if not is_celery_program():
            raise
        print(f"celery: {error.message}", file=sys.stderr)  # noqa: T201
        raise SystemExit(error.exit_code) from None


def broker_url() -> str:
    """What -b says, else BROKER_URL, else the running stack.

    Celery hands -b on in CELERY_BROKER_URL, which would win over every setting, and takes BROKER_URL for -b when that
    is not typed: an address that `manage.py env` printed before a restart would win over the running stack.
    """
    current = settings.current()
    typed = os.environ.get("CELERY_BROKER_URL", "")
    if typed and typed != os.environ.get("BROKER_URL"):
        return typed
    os.environ.pop("CELERY_BROKER_URL", None)
    return current.broker_url
