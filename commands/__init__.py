"""The commands of `manage.py`, one file per subject: parse, call one function, print its value, return an exit code."""

from __future__ import annotations

import sys

import typer

from commands import (
    bench,
    check,
    config,
    dead_tasks,
    demo,
    documents,
    kafka_worker,
    migrate,
    outbox,
    reclaim,
    relay,
    search,
    show,
    stack,
    stats,
    submit,
    tasks,
    token,
)
from commands.output import complain
from models.errors import CeleriacError
from settings import SettingsError

app = typer.Typer(
    name="manage.py",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Celeriac: Celery tasks whose effects happen once, with a receipt.",
    epilog="Exit codes: 0 done, 1 failed, 2 misuse, 3 a server is unreachable.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
SUBJECTS = (
    stack, migrate, check, config, submit, tasks, show, stats, dead_tasks, documents, search, reclaim, relay,
    kafka_worker, outbox, token, bench, demo,
)  # fmt: skip
for subject in SUBJECTS:
    subject.register(app)


def main() -> int:
    """Run one command; errors of ours are sentences, never tracebacks."""
    try:
        app()
    except (CeleriacError, SettingsError) as error:
        complain(error.message)
        return error.exit_code
    except OSError as error:
        complain(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}.")
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if not _is_of_the_database(error):
            raise
        complain(f"The database refused: {str(error).partition(chr(10))[0]}")
        return 1
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    return 0


def _is_of_the_database(error: Exception) -> bool:
    """Without loading SQLAlchemy for commands that do not."""
    exceptions = sys.modules.get("sqlalchemy.exc")
    return exceptions is not None and isinstance(error, exceptions.DBAPIError)


if __name__ == "__main__":
    sys.exit(main())
