"""The outbox's page shows each destination as the ledger knows it; operators requeue and discard dead events there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

import settings
from api.tokens import Scope
from console import outbox
from models.engine import engine
from models.sql import sql
from outbox import destination_states, event_pages
from outbox.circuit import Circuits
from outbox.lease import ClaimedEvent
from outbox.publishers.contract import DestinationDown, Failed, Result, Sent
from outbox.relay import Relay
from tally.counts import counts
from tasks.operations.pauses import pause_queue
from tests.api.callers import make_token
from tests.console.forms import XSS, is_escaped, page_of, refuses_reader_and_foreigner, sent
from tests.console.visits import logged_in, words
from tests.outbox.ledger import WAKEUP, insert, move, rows
from tests.outbox.scripted import Clock, scripted
from tests.servers import ServersOfTests
from tests.tasks.command_line import manage

PATH = "/console/outbox"
SECRET = "https://user:hunter2@crm.internal/hook?secret=hunter2"


@pytest.fixture
def browser(stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    monkeypatch.setenv("OUTBOX_DESTINATIONS", json.dumps({"orders": SECRET}))
    settings.current.cache_clear()
    return logged_in(make_token("ann", Scope.OPERATE))


@pytest.fixture
def reader(browser: TestClient) -> TestClient:
    return logged_in(make_token("eve", Scope.TASKS_READ_ALL))


@pytest.fixture
def relay(browser: TestClient) -> Iterator[Relay]:
    relay = Relay.of(settings.current())
    yield relay
    relay.close()


def no_answer(_event: ClaimedEvent) -> Result:
    raise DestinationDown("crm.internal refused the connection")


def refuse(_event: ClaimedEvent) -> Result:
    return Failed("it answered 500 with <b>words</b>")


def destination(page: str, name: str = "orders") -> list[str]:
    """Return the cells of a destination."""
    found = re.search(rf'<tr id="{re.escape(name)}">.*?</tr>', page, re.DOTALL)
    assert found, words(page)
    return [words(cell) for cell in re.findall(r"<t[hd].*?</t[hd]>", found[0], re.DOTALL)]


def listed(page: str) -> list[int]:
    return [int(each) for each in re.findall(r'class="id" href="/console/outbox/(\d+)"', page)]


def audits() -> list[tuple[str, str, str]]:
    with engine().connect() as connection:
        found = connection.execute(sql("SELECT code, worker_id, detail FROM ledger.outbox_audit ORDER BY id"))
        return [tuple(row) for row in found]


def test_the_numbers_of_a_destination_are_those_of_the_command_line(stack: ServersOfTests, browser: TestClient) -> None:
    insert("orders", 3)
    insert("orders", 2, next_retry_at="2100-01-01")
    insert("orders", 1, status="RETRYING", next_retry_at="2100-01-01", ordering_key="k", last_error="500")
    insert("orders", 4, status="DEAD", last_error="no")
    insert(WAKEUP, 1)
    move(stack, 200)
    told = {each["destination"]: each for each in manage("outbox", "--json").json}
    name, condition, due, oldest, scheduled, retrying, dead, *_ = destination(page_of(browser, PATH))
    assert (name, oldest) == ("orders https", "3 m")
    assert [due, scheduled, dead] == [str(told["orders"][each]) for each in ("due", "scheduled", "dead")]
    assert [due, scheduled, retrying, dead] == ["3", "3", "1", "4"]
    assert condition == "waiting Events are due and none is sent. Does beat or `manage.py relay` run?"
    assert destination(page_of(browser, PATH), WAKEUP)[0] == "celery:ingest wake-ups of ingest"


def test_an_unreachable_destination_says_since_when_and_when_it_is_tried_again(
    stack: ServersOfTests, browser: TestClient, reader: TestClient, relay: Relay
) -> None:
    clock = Clock()
    relay.circuits = Circuits(clock)
    publisher = scripted(relay, "orders", no_answer)
    insert("orders", 3)
    relay.tick()
    move(stack, 40)
    clock.now += 40
    relay.tick()
    page = page_of(browser, PATH)
    condition = destination(page)[1]
    assert "unreachable No answer for 40 s: 2 tries, the last" in condition
    assert "crm.internal refused the connection" in condition
    assert re.search(r"The next try (comes in [\d.]+ s|is due)\.", condition)
    assert "crm.internal" not in page_of(reader, PATH)
    assert "No answer for" in page_of(reader, PATH)
    publisher.answer = lambda _event: Sent()
    move(stack, 100)
    clock.now += 100
    relay.tick()
    counts.append()
    _, condition, due, *_, sent_events, _, last_sent = destination(page_of(browser, PATH))
    assert (condition, due, sent_events) == ("answers", "0", "3")
    assert re.fullmatch(r"now|\d.* ago", last_sent)


def test_a_destination_that_refuses_everything_is_failing_and_a_paused_queue_is_named(
    stack: ServersOfTests, browser: TestClient, relay: Relay
) -> None:
    scripted(relay, "orders", refuse)
    insert("orders", 2)
    relay.tick()
    counts.append()
    assert destination(page_of(browser, PATH))[1].startswith("failing")
    insert(WAKEUP, 1)
    pause_queue(engine(), settings.current(), "ingest", actor="bob", reason="closed")
    assert destination(page_of(browser, PATH), WAKEUP)[1].startswith("paused")
    insert("elsewhere", 1)
    assert destination(page_of(browser, PATH), "elsewhere")[1].startswith("not configured")


def test_lists_show_the_events_of_a_status_and_a_destination_page_by_page(browser: TestClient) -> None:
    new = insert("orders", 60)
    ordered = insert("orders", 1, ordering_key="k")
    failed = insert("orders", 1, status="RETRYING", next_retry_at="2100-01-01", last_error="500")
    other = insert("other", 1)
    dead = insert("orders", 1, status="DEAD", last_error="no")
    done = insert("orders", 1, status="SENT", sent_at="2026-01-01")
    first = page_of(browser, f"{PATH}?destination=orders")
    assert listed(first) == (new + ordered + failed)[:-51:-1]
    older = re.search(r'href="(/console/outbox\?[^"]+)" rel="next"', first)
    assert older
    second = page_of(browser, older[1].replace("&amp;", "&").partition("#")[0])
    assert listed(second) == (new + ordered + failed)[:12][::-1]
    assert 'rel="next"' not in second
    assert listed(page_of(browser, f"{PATH}?status=retrying")) == failed
    assert listed(page_of(browser, f"{PATH}?status=waiting&destination=other")) == other
    assert listed(page_of(browser, f"{PATH}?status=dead&destination=orders")) == dead
    assert listed(page_of(browser, f"{PATH}?status=sent")) == done
    assert listed(page_of(browser, f"{PATH}?status=nonsense&before=9e9&destination=")) == listed(
        page_of(browser, f"{PATH}?status=waiting")
    )


def test_sent_events_of_a_rare_destination_are_found_by_going_on(
    browser: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_pages, "WINDOW", 60)
    rare = insert("rare", 1, status="SENT", sent_at="2026-01-01")
    insert("orders", 60, status="SENT", sent_at="2026-01-01")
    page = page_of(browser, f"{PATH}?status=sent&destination=rare")
    assert listed(page) == []
    assert "among the next 60" in words(page)
    older = re.search(r'href="(/console/outbox\?[^"]+)" rel="next"', page)
    assert older
    assert listed(page_of(browser, older[1].replace("&amp;", "&").partition("#")[0])) == rare


def test_dead_events_of_a_destination_are_requeued_after_its_name_was_typed(browser: TestClient) -> None:
    insert("orders", 3, status="DEAD", attempt_count=9, last_error="it answered 500\nTraceback")
    other = insert("other", 1, status="DEAD", last_error="no")
    page = words(page_of(browser, f"{PATH}?status=dead&destination=orders"))
    assert "3 dead events, by error 3 orders: it answered 500" in page
    assert "Choose a destination" in words(page_of(browser, f"{PATH}?status=dead"))
    form = {"page": f"{PATH}?status=dead", "destination": "orders", "action": "requeue", "reason": "it is back"}
    place, text = sent(browser, f"{PATH}/dead", **form, confirmation="order")
    assert "Nothing was changed: type orders to confirm." in text
    assert place == f"{PATH}?destination=orders&status=dead#event-list"
    assert {status for (status,) in rows("status")} == {"DEAD"}
    _, text = sent(browser, f"{PATH}/dead", **form, confirmation="orders")
    assert "3 events for orders were requeued." in text
    assert rows("status, attempt_count", "destination = 'orders'") == [("NEW", 0)] * 3
    assert rows("id", "status = 'DEAD'") == [(other[0],)]
    code, actor, detail = audits()[0]
    assert (code, actor) == ("outbox_requeued", "console:ann")
    assert detail.startswith("it is back; failures: 9, last error: it answered 500")


def test_only_the_events_with_an_error_are_discarded_if_one_is_given(browser: TestClient) -> None:
    insert("orders", 2, status="DEAD", last_error="gone 410")
    kept = insert("orders", 1, status="DEAD", last_error="busy 503")
    page = page_of(browser, f"{PATH}?status=dead&destination=orders&error=410")
    assert len(listed(page)) == 2
    assert 'name="error" value="410"' in page
    form = {"destination": "orders", "confirmation": "orders", "error": "410", "action": "discard"}
    _, text = sent(browser, f"{PATH}/dead", page=PATH, **form)
    assert "2 events for orders were discarded." in text
    assert rows("id") == [(kept[0],)]
    assert "does not say whether" in sent(browser, f"{PATH}/dead", page=PATH, **{**form, "action": "drop"})[1]


def test_a_request_changes_what_its_time_allows_and_says_how_many_are_left(
    browser: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "CHANGE_SECONDS", -1.0)
    insert("orders", 620, status="DEAD", last_error="no")
    form = {"destination": "orders", "confirmation": "orders", "action": "requeue"}
    assert (
        "500 events for orders were requeued. 120 events are left"
        in sent(browser, f"{PATH}/dead", page=PATH, **form)[1]
    )
    assert "120 events for orders were requeued. " in sent(browser, f"{PATH}/dead", page=PATH, **form)[1]


def test_one_event_shows_payload_and_audits_and_can_be_requeued_or_discarded(browser: TestClient) -> None:
    first, second = insert("orders", 2, status="DEAD", last_error="no\nbecause", headers='{"trace": "t-1"}')
    page = words(page_of(browser, f"{PATH}/{first}"))
    for shown in ('"type": "t"', '"trace": "t-1"', "no because", "Requeue", "orders"):
        assert shown in page
    place, text = sent(browser, f"{PATH}/{first}", page=f"{PATH}/{first}", action="requeue", reason="try it")
    assert (place, f"The event {first} was requeued." in text) == (f"{PATH}/{first}", True)
    assert "outbox_requeued console:ann try it; failures: 0" in text
    assert "it is not dead any more" in sent(browser, f"{PATH}/{first}", page=PATH, action="requeue")[1]
    _, text = sent(browser, f"{PATH}/{second}", page=PATH, action="discard")
    assert f"The event {second} was discarded." in text
    assert "this is what the audit has kept" in text
    assert rows("id, status") == [(first, "NEW")]


def test_a_wakeup_names_its_tasks(reader: TestClient) -> None:
    (id_,) = insert(WAKEUP)
    ((payload,),) = rows("payload")
    page = page_of(reader, f"{PATH}/{id_}")
    assert f'href="/console/tasks/{payload["ids"][0]}"' in page


def test_a_reader_sees_no_buttons_payloads_errors_and_addresses(browser: TestClient, reader: TestClient) -> None:
    hidden = {"last_error": "password of crm.internal", "locked_by": "web-1:7"}
    (id_,) = insert("orders", 1, status="DEAD", headers='{"trace": "t-1"}', **hidden)
    insert("orders", 1, status="RETRYING", next_retry_at="2100-01-01", **hidden)
    with engine().begin() as connection:
        connection.execute(
            sql("""
                INSERT INTO ledger.outbox_audit (outbox_id, code, worker_id, detail) VALUES (:id, 'c', 'web-1:7', :d)
            """),
            {"id": id_, "d": "password of crm.internal"},
        )
    paths = (PATH, f"{PATH}?status=dead&destination=orders", f"{PATH}?status=retrying", f"{PATH}/{id_}")
    texts = {who: "".join(page_of(who, path) for path in paths) for who in (reader, browser)}
    for secret in ("password of", "web-1:7", "t-1", 'name="action"'):
        assert secret in texts[browser], secret
        assert secret not in texts[reader], secret
    assert "hunter2" not in texts[browser]
    assert len(listed(page_of(reader, f"{PATH}?status=dead&error=nothing"))) == 1, "an error cannot be guessed"
    for path in (f"{PATH}/dead", f"{PATH}/{id_}"):
        assert refuses_reader_and_foreigner(reader, browser, path, page=PATH)
    assert rows("status", f"id = {id_}") == [("DEAD",)]


def test_markup_is_shown_as_text(browser: TestClient) -> None:
    (id_,) = insert(
        XSS, 1, status="DEAD", last_error=XSS, ordering_key=XSS, dedup_key=XSS, headers=json.dumps({"x": XSS})
    )
    insert(XSS, 1, status="RETRYING", next_retry_at="2100-01-01", last_error=f"unreachable: {XSS}", locked_by=XSS)
    insert(XSS, 1, status="SENT", sent_at="2026-01-01", external_id=XSS)
    with engine().begin() as connection:
        connection.execute(
            sql("INSERT INTO ledger.outbox_audit (outbox_id, code, worker_id, detail) SELECT id, 'outbox_flush_retry',"
                " :x, 'unreachable: ' || :x FROM ledger.outbox_event"),
            {"x": XSS},
        )  # fmt: skip
    client_path = f"{PATH}?destination={XSS.replace('&', '%26').replace(';', '%3B').replace('+', '%2B')}"
    for path in (PATH, f"{client_path}&status=dead", f"{client_path}&status=sent", f"{PATH}?status=retrying"):
        assert is_escaped(page_of(browser, path)), path
    assert is_escaped(page_of(browser, f"{PATH}/{id_}"))


def test_an_empty_outbox_says_what_would_be_here(stack: ServersOfTests, reader: TestClient) -> None:
    page = words(page_of(reader, PATH))
    assert "quiet Nothing was sent in the last minute." in page
    assert "No event waits: everything was sent, or is dead." in page
    assert "Events whose last attempt fails appear here" in words(page_of(reader, f"{PATH}?status=dead"))


@pytest.mark.parametrize("id_", ["17", "0", "x", "9" * 30, "-1"])
def test_an_unknown_event_is_a_page_that_says_so(reader: TestClient, id_: str) -> None:
    answer = reader.get(f"{PATH}/{id_}")
    assert (answer.status_code, "There is no such page" in words(answer.text)) == (404, True)


def test_counts_stop_at_their_ceiling(browser: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (destination_states, outbox):
        monkeypatch.setattr(module, "CEILING", 3)
    insert("orders", 5)
    insert("orders", 5, status="DEAD", last_error="no")
    cells = destination(page_of(browser, PATH))
    assert (cells[2], cells[6]) == ("3+", "3+")
