"""The life of a stack from inside: this process becomes its supervisor until it is told to stop."""

from __future__ import annotations

from collections.abc import Callable

from embedded.given import require_given_servers
from embedded.home import Home
from embedded.roles import SUPERVISOR
from embedded.stack import plan
from embedded.stopping import stop_parts
from embedded.supervisor import Supervisor, Tell
from models.engine import make_engine
from models.schema import migrate
from settings import Settings


def supervise(
    settings: Settings, tell: Tell, *, verbose: bool, when_ready: Callable[[Home], Callable[[], None]]
) -> bool:
    """Start everything, stay until a signal comes, stop everything. False if a stack runs here already.

    `when_ready` is called once everything runs; what it returns is called before everything stops.
    """
    home = Home(settings.home)
    home.create()
    if not home.lock():
        return False
    try:
        require_given_servers(settings)
        home.ready_file(SUPERVISOR).unlink(missing_ok=True)
        if left := stop_parts(home):  # before ports are chosen: theirs are to be used again
            tell(f"stopped {', '.join(left)}, left behind by an earlier run")
        supervisor = Supervisor(home, plan(home, settings, verbose=verbose), tell)
        with supervisor.listening():
            try:
                supervisor.start(lambda: _migrate(settings))
                home.ready_file(SUPERVISOR).touch()
                before_stop = when_ready(home)
                try:
                    supervisor.watch()
                finally:
                    before_stop()
            finally:
                supervisor.stop()
    finally:
        home.ready_file(SUPERVISOR).unlink(missing_ok=True)
        home.unlock()
    return True


def _migrate(settings: Settings) -> None:
    engine = make_engine(settings.database_url)
    try:
        migrate(engine)
    finally:
        engine.dispose()
