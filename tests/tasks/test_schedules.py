"""A real worker and two beats run a schedule."""

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest

from chaos.programs import running, start_celery, start_worker
from child_process import ChildProcess
from models.engine import engine
from models.sql import sql
from tasks.core.holders import HOST
from tests.outbox.ledger import move
from tests.servers import ServersOfTests, wait_until
from tests.tasks.work import effects, rows

TYPE = "test.every_second"


def periods(status: str = "%") -> list[datetime]:
    found = rows("payload->>'scheduledFor'", "type = :type AND status LIKE :status", type=TYPE, status=status)
    return sorted(datetime.fromisoformat(period) for (period,) in found)


def wait_for_another(why: str) -> None:
    last = periods()[-1]
    wait_until(lambda: periods("SUCCEEDED")[-1] > last, f"another period {why}")


def is_ticked_by(worker: ChildProcess) -> bool:
    """Return whether the main process of the worker has run the last tick. Ticks of beat run in its children."""
    with engine().connect() as connection:
        holder = connection.execute(sql("SELECT holder FROM ledger.tick WHERE name = 'schedules'")).scalar_one()
    return bool(holder == f"{HOST}:{worker.popen.pid}")


@pytest.mark.guarantee
def test_two_beats_then_one_that_is_restarted_then_none_run_each_period_once(
    ledger: ServersOfTests, tmp_path: Path
) -> None:
    beats = [start_celery(tmp_path, f"beat{number}", "beat") for number in (1, 2)]
    worker = start_worker(tmp_path, "worker", INGEST_HANDLERS="tests.tasks.schedule_handlers")
    with running(worker, *beats):
        wait_until(lambda: len(periods("SUCCEEDED")) >= 3, "three periods of two beats")
        beats[0].kill()
        wait_for_another("of the other beat")
        beats[1].kill()
        with running(start_celery(tmp_path, "beat3", "beat")):
            wait_for_another("of a beat that was restarted")
        move(ledger, 25)  # beat counts as silent after 20 seconds
        wait_until(lambda: is_ticked_by(worker), "the worker runs the tick")
        wait_for_another("without a beat")
    assert {after - before for before, after in pairwise(periods())} == {timedelta(seconds=1)}
    assert set(effects().values()) == {1}
    assert len(effects()) == len(periods("SUCCEEDED"))
