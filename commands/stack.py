"""up, down, ps, env: control the stack on this machine."""

# ruff: noqa: PLC0415 - settings, SQLAlchemy and Alembic load slowly

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from commands.output import camel, console, print_json, print_table
from embedded.roles import FLOWER_USER, SERVER_ROLES, SUPERVISOR

if TYPE_CHECKING:
    from embedded.background import Status
    from embedded.home import Home
    from embedded.log_follower import LogFollower

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    for command in (up, down, ps, env):
        app.command()(command)


def up(
    detach: Annotated[
        bool, typer.Option("-d", "--detach", help="Run in the background; return when everything is ready.")
    ] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Log information, not only warnings.")] = False,
    supervise: Annotated[bool, typer.Option("--supervise", hidden=True)] = False,
) -> None:
    """Start the servers, workers, beat, API and Flower, and follow their logs. Ctrl-C stops everything.

    Example: `manage.py up -d && eval "$(manage.py env)" && curl $API_URL/healthz`
    """
    import settings
    from embedded import background

    current = settings.current()
    if detach:
        with console.status("starting …"):
            started = background.start_detached(current, verbose=verbose)
        _print_running(started)
        return
    from embedded.foreground import supervise as supervise_stack
    from embedded.log_follower import LogFollower

    if supervise:
        supervise_stack(current, _report_to_log, verbose=verbose, when_ready=lambda _home: lambda: None)
    else:
        with console.status("starting …") as progress:

            def show_and_follow(home: Home) -> Callable[[], None]:
                progress.stop()
                _print_running(True)
                console.print("[dim]Ctrl-C stops everything; logs follow.[/dim]")
                roles = [line.role for line in background.status(current) if verbose or line.role not in SERVER_ROLES]
                follower = LogFollower(home, [role for role in roles if role != SUPERVISOR], console)
                follower.start()
                return lambda: _stop_following(follower)

            started = supervise_stack(current, _report, verbose=verbose, when_ready=show_and_follow)
        if not started:
            _print_running(False)


def down() -> None:
    """Stop everything that `up` started.

    Example: `manage.py down`
    """
    import settings
    from embedded import background

    with console.status("stopping …"):
        stopped = background.stop(settings.current())
    if stopped:
        console.print(f"Stopped {', '.join(stopped)}.")
    else:
        console.print(f"No stack is running in {settings.current().home}.", markup=False)


def ps(as_json: Json = False) -> None:
    """List the parts of the stack: programs and servers, with their addresses and where each login is kept.

    Example: `manage.py ps --json`
    """
    import settings
    from embedded import background

    lines = background.parts(settings.current())
    if as_json:
        print_json([camel(line) for line in lines])
    elif lines:
        _print_programs(lines)
    else:
        console.print(f"No stack is running in {settings.current().home}: run `make up`.", markup=False)


def env() -> None:
    """Print the addresses of the stack as shell exports. They contain its passwords.

    DATABASE_URL names the driver, as SQLAlchemy needs it. psql does not read it, but it reads PGHOST, PGPORT, PGUSER,
    PGPASSWORD and PGDATABASE.

    Example: `eval "$(manage.py env)" && psql -c 'SELECT id, status FROM ingest_task'`
    """
    import settings
    from embedded import background

    for name, value in background.exports(settings.current()).items():
        print(f"export {name}={shlex.quote(value)}")


def _report(sentence: str) -> None:
    console.print(f"[bold]{SUPERVISOR}[/bold] │ ", end="")
    console.print(sentence, markup=False)


def _report_to_log(sentence: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {sentence}", flush=True)


def _stop_following(follower: LogFollower) -> None:
    console.print("[dim]stopping …[/dim]")
    follower.stop()


def _print_running(started: bool) -> None:
    import settings
    from embedded import background

    current = settings.current()
    console.print(f"[bold]{'Celeriac is running' if started else 'A stack is already running'}[/bold] in ", end="")
    console.print(f"{current.home}\n", markup=False)
    _print_programs(background.parts(current))
    stack = current.stack
    login = f"{FLOWER_USER} / {current.secrets.get('flower', '')}"
    console.print(f"\nAPI      {stack.get('API_URL')}")
    console.print(f"Console  {_console_address()}", markup=False)
    console.print(f"Flower   {stack.get('FLOWER_URL')}   login {login}")
    console.print("\nTry it:")
    console.print('  eval "$(./manage.py env)"', markup=False)
    console.print("  curl $API_URL/healthz")
    console.print("  .venv/bin/celery -A tasks inspect ping -t 10\n")


def _console_address() -> str:
    """Return a link that logs in once; without a ledger, the address alone."""
    import settings
    from console.links import console_address, new_link
    from console.sessions import LINK_MINUTES
    from models.errors import CeleriacError

    current = settings.current()
    try:
        return f"{new_link(current)}   logs in once, within {LINK_MINUTES} minutes"
    except CeleriacError as error:
        return f"{console_address(current)}   no login link: {error.message}"


def _print_programs(lines: list[Status]) -> None:
    rows = [(line.role, str(line.pid or "-"), line.status, line.address, line.login) for line in lines]
    print_table(("program", "pid", "status", "address", "login"), rows)
