"""From the overview, with nothing but the id of a task, the reason why it does not run is found in four pages or less.

Each test types the id into the search box and then only clicks links, as a person does who does not know the console.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import timedelta

import pytest
from playwright.sync_api import Browser, expect

import settings
from api.tokens import Scope
from console import slow_answers
from models.engine import engine
from models.sql import sql
from outbox.relay import Relay
from tasks.core.registered_types import Registration
from tasks.operations.pauses import pause_queue
from tasks.operations.why_waiting import ReasonCode
from tests.api.callers import make_token
from tests.api.server import Server
from tests.app import point_app_at
from tests.console.browser import Visit, chromium
from tests.servers import ServersOfTests
from tests.tasks.command_line import FLAKY, submitted
from tests.tasks.deliveries import claimed
from tests.tasks.limited import TYPE as LIMITED
from tests.tasks.limited import admitted, limited
from tests.tasks.registrations import handler_of, registered

MOST_LOADS = 4
WAKEUPS = '[id="celery:ingest"]'
NOWHERE = "redis://127.0.0.1:1/0"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


class Search:
    """A person who looks for the reason. Every page that is loaded counts, the overview too."""

    def __init__(self, visit: Visit) -> None:
        self.page = visit.page
        self.loads = 0
        self.page.on("load", lambda _: self._count())
        visit.go("/console")

    def task(self, id_: uuid.UUID) -> None:
        """Type the id into the search box, which `/` focuses."""
        self.page.keyboard.press("/")
        self.page.keyboard.insert_text(str(id_))
        self.page.keyboard.press("Enter")
        self.page.wait_for_url(f"**/console/tasks/{id_}")

    def reads(self, *sentences: str, place: str = ".reasons") -> None:
        """Check that the page says this, and that it was found soon enough."""
        for sentence in sentences:
            expect(self.page.locator(place).first).to_contain_text(sentence)
        assert 2 <= self.loads <= MOST_LOADS

    def follows_link_of(self, reason: ReasonCode) -> None:
        """Click the link that stands beside a reason."""
        with self.page.expect_event("load"):
            self.page.locator(f".reasons .{reason} a").click()

    def _count(self) -> None:
        self.loads += 1


@pytest.fixture
def search(
    ledger: ServersOfTests, server: Server, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Search]:
    monkeypatch.setattr(slow_answers, "KEPT_SECONDS", 0.0)
    make_token("reader", Scope.TASKS_READ_ALL, Scope.OPERATE)
    with Visit.begin(browser, server.port) as visit:
        visit.log_in("reader")
        yield Search(visit)
        assert visit.complaints == []


def consumed(type: str = FLAKY, queue: str = "ingest") -> Registration:
    """Register a worker that knows the type and consumes the queue, and no other."""
    return registered(handler_of(type), name="web-1:41-worker", consumed=(queue,))


def test_not_due(search: Search) -> None:
    consumed()
    (id_,) = submitted({}, run_at=timedelta(minutes=10))
    search.task(id_)
    search.reads("It is due at", "in 0:09:5")
    assert search.page.locator(".reasons").get_by_role("button", name="Run now").is_visible()


def test_key_blocked(search: Search) -> None:
    consumed()
    (first,), (second,) = (submitted({"n": n}, partition_key="customer 5") for n in range(2))
    claimed([first], keyed=True)
    search.task(second)
    search.reads("1 task is ahead of it in partition key 'customer 5'")
    search.follows_link_of(ReasonCode.NOT_ITS_TURN)
    search.reads("It has been running since")
    assert str(first) in search.page.url


def test_queue_paused(search: Search) -> None:
    consumed()
    (id_,) = submitted({})
    pause_queue(engine(), settings.current(), "ingest", actor="bob", reason="the bank is closed")
    search.task(id_)
    search.reads("Its queue 'ingest' was paused at", "by bob: the bank is closed")
    search.follows_link_of(ReasonCode.QUEUE_PAUSED)
    search.reads("Starts no tasks since", "by bob: the bank is closed", place="#ingest")
    assert search.page.get_by_role("button", name="Resume ingest").is_visible()


def test_limit_reached(search: Search) -> None:
    with limited(max_running=1):
        running, waiting = submitted({}, {}, type=LIMITED)
        admitted([running, waiting])
        search.task(waiting)
        search.reads("It waits for its limit since", f"1 of 1 of {LIMITED} are running")
        search.follows_link_of(ReasonCode.OVER_LIMIT)
        search.reads(LIMITED, "1 at once", "1 of 1", place="table")


def test_no_worker(search: Search) -> None:
    consumed().end()
    (id_,) = submitted({})
    search.task(id_)
    search.reads("No worker consumes its queue ingest: start celery -A tasks worker.")
    search.follows_link_of(ReasonCode.NO_WORKER)
    search.reads("so no task starts. Start one: celery -A tasks worker", place="main")


def test_unknown_type(search: Search) -> None:
    consumed("another.type")
    (id_,) = submitted({})
    search.task(id_)
    search.reads(f"No live worker knows the type '{FLAKY}'. Add the module with its handler to INGEST_HANDLERS")
    search.follows_link_of(ReasonCode.UNKNOWN_HANDLER)
    search.reads(f"No live worker of the queue ingest knows the type {FLAKY}", place="main")


@pytest.fixture
def unwoken(search: Search, ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> Iterator[uuid.UUID]:
    """A task whose wake-up the relay could not publish, because the broker is unreachable."""
    consumed()
    point_app_at(NOWHERE)
    monkeypatch.setenv("BROKER_URL", NOWHERE)
    settings.current.cache_clear()
    with engine().begin() as connection:
        id_ = connection.execute(sql(f"SELECT ledger.ingest_submit('{FLAKY}', '{{}}')")).scalar_one()
    relay = Relay.of(settings.current())
    relay.tick()
    relay.close()
    yield uuid.UUID(str(id_))
    point_app_at(ledger.addresses["BROKER_URL"])


def test_broker_unreachable(search: Search, unwoken: uuid.UUID) -> None:
    search.task(unwoken)
    search.reads("The broker does not answer. The task will be woken when the broker is back.")
    search.follows_link_of(ReasonCode.BROKER_UNREACHABLE)
    search.reads("unreachable", "No answer for", "The next try", place=WAKEUPS)


def test_circuit_open(search: Search, unwoken: uuid.UUID, ledger: ServersOfTests) -> None:
    point_app_at(ledger.addresses["BROKER_URL"])
    search.task(unwoken)
    search.reads("The circuit of ingest is open: the broker gave no answer when it was tried.")
    search.follows_link_of(ReasonCode.WAKEUP_IN_OUTBOX)
    search.reads("unreachable", "No answer for", "The next try", place=WAKEUPS)
