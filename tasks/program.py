"""Which program this is, and how it must have been started. Only the standard library: it is asked before all else."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def is_celery_program() -> bool:
    """True for `celery …` and `python -m celery …`; False for whoever merely imports us."""
    path = Path(sys.argv[0])
    return path.name == "celery" or path.parts[-2:] == ("celery", "__main__.py")


def give_work_back_on_sigterm() -> None:
    """SIGTERM as Celery's cold shutdown: messages in hand go back at once instead of being worked off.

    Celery copies this variable into several modules while it is imported, which has happened before this line; so a
    worker that was started without it begins once more with it.
    """
    if is_celery_program() and "worker" in sys.argv and "REMAP_SIGTERM" not in os.environ:
        os.environ["REMAP_SIGTERM"] = "SIGQUIT"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - the same command
