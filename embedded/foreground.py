"""Run a stack in this process: become its supervisor until a signal comes."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from child_process import OwnProcess
from embedded.background import lock_or_find_ready
from embedded.external_servers import require_external_servers
from embedded.home import Home
from embedded.roles import SUPERVISOR
from embedded.shutdown import stop_programs
from embedded.signals import Signals
from embedded.stack import plan
from embedded.supervisor import Report, Supervisor
from models.engine import make_engine
from models.schema import migrate
from settings import Settings


def supervise(
    settings: Settings, report: Report, *, verbose: bool, when_ready: Callable[[Home], Callable[[], None]]
) -> bool:
    """Start everything, wait for a signal, stop everything. Return False if a stack runs here already.

    `when_ready` is called when everything runs; the function it returns is called before everything stops.
    """
    home = Home(settings.home)
    home.create()
    if not lock_or_find_ready(home):
        return False
    try:
        OwnProcess.of(os.getpid()).write(home.pid_file(SUPERVISOR))  # at once: `down` must find the lock's holder
        home.ready_file(SUPERVISOR).unlink(missing_ok=True)
        with Signals() as signals:
            _run(home, settings, _ignoring_full_disk(report), signals, verbose=verbose, when_ready=when_ready)
    finally:
        home.ready_file(SUPERVISOR).unlink(missing_ok=True)
        home.pid_file(SUPERVISOR).unlink(missing_ok=True)
        home.unlock()
    return True


def _run(
    home: Home,
    settings: Settings,
    report: Report,
    signals: Signals,
    *,
    verbose: bool,
    when_ready: Callable[[Home], Callable[[], None]],
) -> None:
    require_external_servers(settings)
    if left := stop_programs(home):  # before ports are chosen, so that theirs are free again
        report(f"stopped {', '.join(left)}, left behind by an earlier run")
    supervisor = Supervisor(home, plan(home, settings, verbose=verbose), report, signals)
    try:
        supervisor.start(lambda: _migrate(settings))
        home.ready_file(SUPERVISOR).touch()
        before_stop = when_ready(home)
        try:
            supervisor.watch()
        finally:
            before_stop()
    finally:
        home.ready_file(SUPERVISOR).unlink(missing_ok=True)  # from now on, another `up` waits until we have ended
        supervisor.stop()


def _ignoring_full_disk(report: Report) -> Report:
    """Return a report function that ignores write errors: a full disk must not end the stack."""

    def careful(sentence: str) -> None:
        with suppress(OSError):
            report(sentence)

    return careful


def _migrate(settings: Settings) -> None:
    engine = make_engine(settings.database_url)
    try:
        migrate(engine)
    finally:
        engine.dispose()
