"""How many events a relay claims at once, and for how long, follows the settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest

import settings
from outbox.destinations import Destination
from outbox.lease import ClaimedEvent
from outbox.publishers.contract import Failed, Result, Sent
from outbox.relay import Relay
from tests.outbox.ledger import insert, rows
from tests.outbox.scripted import scripted
from tests.servers import ServersOfTests

LEFT = "extract(epoch FROM lease_until - ledger.ledger_now())"  # seconds until the lease expires


class Observer:
    """A destination that notes the size of each batch and what is left of its lease."""

    is_slow: ClassVar[bool] = False

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.lefts: list[float] = []

    def publish(self, events: Sequence[ClaimedEvent]) -> Sequence[Result]:
        self.sizes.append(len(events))
        self.lefts += [float(left) for (left,) in rows(LEFT, f"id = {events[0].id}")]
        return [Sent()] * len(events)

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("batch", "sizes", "lease"), [("3", [3, 3, 1], "7"), ("200", [7], "70")])
def test_a_batch_has_the_size_and_a_lease_the_length_of_the_settings(
    stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch, batch: str, sizes: list[int], lease: str
) -> None:
    monkeypatch.setenv("OUTBOX_PUBLISH_BATCH_SIZE", batch)
    monkeypatch.setenv("OUTBOX_LEASE_SECONDS", lease)
    settings.current.cache_clear()
    relay, observer = Relay.of(settings.current()), Observer()
    relay._destinations.by_name["hook"] = Destination(observer)
    insert("hook", 7)
    assert relay.tick().sent == 7
    relay.close()
    assert observer.sizes == sizes
    assert observer.lefts == [pytest.approx(int(lease), abs=1)] * len(sizes)


@pytest.mark.parametrize("base", [20_000, 80_000])
def test_the_first_wait_of_a_failed_event_is_the_base_of_the_settings(
    stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch, base: int
) -> None:
    monkeypatch.setenv("OUTBOX_RETRY_BASE_BACKOFF_MS", str(base))
    monkeypatch.setenv("OUTBOX_RETRY_JITTER", "0")
    settings.current.cache_clear()
    relay = Relay.of(settings.current())
    scripted(relay, "hook", lambda _event: Failed("answered 500"))
    insert("hook")
    assert relay.tick().failed == 1
    relay.close()
    ((seconds,),) = rows("extract(epoch FROM next_retry_at - ledger.ledger_now())")
    assert float(seconds) == pytest.approx(base / 1000, abs=1)
