"""The commands of `manage.py`, one file per subject.

A command parses its options, calls one function, prints the result and returns an exit code. It imports SQLAlchemy and
Celery inside its function, because they load slowly and `--help` does not need them.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup, TyperOption

from commands import (
    bench,
    chaos,
    check,
    config,
    dead_tasks,
    demo,
    documents,
    drill,
    handlers,
    kafka_worker,
    migrate,
    outbox,
    queues,
    receipts,
    reclaim,
    relay,
    schedules,
    show,
    sinks,
    stack,
    stats,
    submit,
    tasks,
    token,
    worker,
)
from commands.output import complain
from models.errors import CeleriacError
from settings import SettingsError

VERSION: Final = "0.1.dev0"  # nothing has been released yet


class Group(TyperGroup):
    """Show flags without a type in every help text: `--json`, not `--json <bool>`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _hide_flag_types(self, ctx)
        return super().parse_args(ctx, args)


def _hide_flag_types(command: Any, context: Any) -> None:
    for parameter in command.get_params(context):
        if isinstance(parameter, TyperOption) and parameter.is_flag:
            parameter.metavar = ""
    for subcommand in getattr(command, "commands", {}).values():
        _hide_flag_types(subcommand, context)


app = typer.Typer(
    name="manage.py",
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Celeriac: Celery tasks whose effects happen once, with a receipt.",
    epilog="Exit codes: 0 done, 1 failed, 2 misuse, 3 a server is unreachable.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
SUBJECTS = (
    stack, migrate, check, config, handlers, submit, tasks, show, schedules, stats, dead_tasks, sinks, receipts,
    documents, reclaim, queues, relay, worker, kafka_worker, outbox, token, bench, chaos, demo, drill,
)  # fmt: skip
for subject in SUBJECTS:
    subject.register(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"Celeriac {VERSION}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> int:
    """Run one command and return its exit code. Expected errors are printed as one sentence, without a traceback."""
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
        if not _is_database_error(error):
            raise
        complain(f"The database refused: {str(error).partition(chr(10))[0]}")
        return 1
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    return 0


def _is_database_error(error: Exception) -> bool:
    """Return whether SQLAlchemy raised the error, without importing SQLAlchemy."""
    exceptions = sys.modules.get("sqlalchemy.exc")
    return exceptions is not None and isinstance(error, exceptions.DBAPIError)


if __name__ == "__main__":
    sys.exit(main())
