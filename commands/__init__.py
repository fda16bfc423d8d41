"""The commands of `manage.py`, one file per subject, listed in `command_list.py`.

Only the module of the command that runs is imported. A command parses its options, calls one function, prints the
result and returns an exit code. It imports settings, SQLAlchemy and Celery inside its function, because they load
slowly and `--help` does not need them.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.main import get_group

from commands.command_list import COMMANDS
from commands.complaint import complain
from home_files import SettingsError
from models.errors import CeleriacError

VERSION: Final = "0.1.dev0"  # nothing has been released yet
MARKUP: Final = "markdown"


class Group(TyperGroup):
    """List all commands, and import only the one that is called.

    Flags are shown without a type: `--json`, not `--json <bool>`.
    """

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {name: TyperCommand(name, help=each.summary) for name, each in COMMANDS.items()}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _hide_flag_types(self, ctx)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - it is printed, not formatted
        from commands.front_page import print_front_page  # noqa: PLC0415 - loads rich

        print_front_page(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if name:
            command = load_command(name)
            _hide_flag_types(command, ctx)
        return name, command, rest


def load_command(name: str) -> Any:
    """Import the module of a command, and return the command with its options and subcommands."""
    subject = typer.Typer(rich_markup_mode=MARKUP)
    import_module(f"commands.{COMMANDS[name].module}").register(subject)
    return get_group(subject).commands[name]


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
    rich_markup_mode=MARKUP,
    help="Celeriac: Celery tasks whose effects happen once, with a receipt.",
    epilog="Exit codes: 0 done, 1 failed, 2 misuse, 3 a server is unreachable.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
