"""The life of a stack from inside: this process becomes its supervisor until it is told to stop."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from embedded.background import lock_or_find_ready
from embedded.external_servers import require_given_servers
from embedded.home import Home
from embedded.process import Process
from embedded.roles import SUPERVISOR
from embedded.signals import Signals
from embedded.stack import plan
from embedded.stop_parts import stop_parts
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
    if not lock_or_find_ready(home):
        return False
    try:
        Process.of(os.getpid()).write(home.pid_file(SUPERVISOR))  # at once: `down` must find whoever has the lock
        home.ready_file(SUPERVISOR).unlink(missing_ok=True)
        with Signals() as signals:
            _run(home, settings, _Careful(tell), signals, verbose=verbose, when_ready=when_ready)
    finally:
        home.ready_file(SUPERVISOR).unlink(missing_ok=True)
        home.pid_file(SUPERVISOR).unlink(missing_ok=True)
        home.unlock()
    return True


def _run(
    home: Home,
    settings: Settings,
    tell: Tell,
    signals: Signals,
    *,
    verbose: bool,
    when_ready: Callable[[Home], Callable[[], None]],
) -> None:
    require_given_servers(settings)
    if left := stop_parts(home):  # before ports are chosen: theirs are to be used again
        tell(f"stopped {', '.join(left)}, left behind by an earlier run")
    supervisor = Supervisor(home, plan(home, settings, verbose=verbose), tell, signals)
    try:
        supervisor.start(lambda: _migrate(settings))
        home.ready_file(SUPERVISOR).touch()
        before_stop = when_ready(home)
        try:
            supervisor.watch()
        finally:
            before_stop()
    finally:
        home.ready_file(SUPERVISOR).unlink(missing_ok=True)  # from now on another `up` waits for our end
        supervisor.stop()


class _Careful:
    """Tells, and does not mind when nobody can be told: a full disk must not end the stack."""

    def __init__(self, tell: Tell) -> None:
        self.tell = tell

    def __call__(self, sentence: str) -> None:
        with suppress(OSError):
            self.tell(sentence)


def _migrate(settings: Settings) -> None:
    engine = make_engine(settings.database_url)
    try:
        migrate(engine)
    finally:
        engine.dispose()
