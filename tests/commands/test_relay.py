"""manage.py relay: the outbox as a program of its own."""

from __future__ import annotations

import json
import signal
import sys

from settings import ROOT
from tests.nodes.programs import finish, start
from tests.outbox.ledger import WAKEUP, insert, rows
from tests.servers import ServersOfTests, wait_until


def test_a_relay_publishes_until_it_is_interrupted_and_writes_json(stack: ServersOfTests) -> None:
    insert(WAKEUP, 3)
    relay = start([sys.executable, str(ROOT / "manage.py"), "relay"], LOG_FORMAT="json")
    try:
        wait_until(lambda: rows("status") == [("SENT",)] * 3, "the events are published", seconds=60)
    finally:
        relay.send_signal(signal.SIGINT)
        done = finish(relay)
    assert done.returncode == 0
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    (published,) = [line for line in lines if line["event"] == "events_published"]
    assert (published["sent"], published["failed"], published["dead"], published["level"]) == (3, 0, 0, "INFO")
