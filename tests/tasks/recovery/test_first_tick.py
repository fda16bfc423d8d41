"""The first tick after an outage of the ledger does not leave lost wake-ups to the next reclaim."""

from __future__ import annotations

import pytest

import settings
from models.errors import Unreachable
from models.ledger_outage import is_outage
from outbox.after_commit_publisher import after_commit_publisher
from tasks import ticks
from tests.outbox.ledger import arrived, move
from tests.servers import ServersOfTests
from tests.tasks.recovery.test_lost_wakeups import GRACE, flush_broker, submitted

pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")


@pytest.mark.parametrize("met_an_outage", [True, False])
def test_the_first_tick_after_an_outage_sends_lost_wakeups_again(
    ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch, met_an_outage: bool
) -> None:
    """Otherwise a worker that has kept a few messages would pause in the middle of the drain, for seconds."""
    ids = submitted(3)
    flush_broker(ledger)
    move(ledger, GRACE + 1)
    if met_an_outage:
        with monkeypatch.context() as changed:
            changed.setenv("DATABASE_URL", "postgresql://celeriac@127.0.0.1:1/nothing")
            settings.current.cache_clear()
            with pytest.raises(Unreachable) as outage:
                ticks.run("relay")
            assert is_outage(outage.value)
        settings.current.cache_clear()
    ticks.run("relay")
    assert after_commit_publisher().wait_until_idle(20)
    assert arrived(ledger) == ({str(one): 1 for one in ids} if met_an_outage else {})
    assert not ticks._met_an_outage
