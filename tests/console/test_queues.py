"""The page about queues and limits shows what the ledger says, and changes it as the command line does."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from celery import Celery
from fastapi.testclient import TestClient

import settings
from api.tokens import Scope
from models.engine import engine
from outbox.after_commit_publisher import after_commit_publisher
from tasks import broker
from tasks.operations import limit_use
from tasks.operations.backlog import check_backlog
from tasks.operations.pauses import pause_queue
from tasks.operations.scale import report_size
from tests.api.callers import make_token
from tests.console.forms import XSS, is_escaped, page_of, refuses_reader_and_foreigner, sent
from tests.console.visits import logged_in, words
from tests.outbox.ledger import move
from tests.servers import ServersOfTests, wait_until
from tests.tasks.command_line import manage
from tests.tasks.deliveries import claimed, delivered, submitted
from tests.tasks.limited import TYPE, admitted, for_tenant, limited
from tests.tasks.registrations import handler_of, registered
from tests.tasks.work import wakeups

PATH = "/console/queues"
POSTS = [f"{PATH}/{name}" for name in ("pause", "resume", "scale")]
pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")


@pytest.fixture
def browser(ledger: ServersOfTests) -> TestClient:
    return logged_in(make_token("ann", Scope.OPERATE))


@pytest.fixture
def reader(ledger: ServersOfTests) -> TestClient:
    return logged_in(make_token("eve", Scope.TASKS_READ_ALL))


def change_setting(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    settings.current.cache_clear()


def card(page: str, queue: str = "ingest") -> str:
    found = re.search(rf'<article class="card unit" id="{queue}">.*?</article>', page, re.DOTALL)
    assert found, page
    return found[0]


def stats(page: str, queue: str = "ingest") -> dict[str, str]:
    found = re.findall(r"<dt>(.*?)</dt><dd[^>]*>(.*?)</dd>", card(page, queue), re.DOTALL)
    return {words(name): words(text) for name, text in found}


def limits(page: str) -> list[list[str]]:
    rows = re.findall(r"<tr>.*?</tr>", page.partition('id="limits-title"')[2], re.DOTALL)[1:]
    return [[words(cell) for cell in re.findall(r"<t[hd].*?</t[hd]>", row, re.DOTALL)] for row in rows]


def test_the_numbers_of_a_queue_are_those_of_the_command_line_and_lead_to_its_tasks(
    ledger: ServersOfTests, browser: TestClient
) -> None:
    claimed(submitted(3))
    delivered(submitted(1, "test.fail", max_attempts=1))
    submitted(2)
    registered(handler_of("a"), name="another:1-worker")
    report_size(engine(), worker="another:1-worker", queues=["ingest"], processes=8)
    assert after_commit_publisher().wait_until_idle(20)
    move(ledger, 61)
    registered(handler_of("a"), name="another:1-worker")
    page, (queue,) = page_of(browser, PATH), manage("queues", "--json").json["queues"]
    found = stats(page)
    assert (found["Due"], found["Running"], found["Dead"], found["In the broker"]) == ("2", "3", "1", "3")
    shown = [int(found[name]) for name in ("Due", "Running", "Dead", "In the broker")]
    assert shown == [queue["due"], queue["running"], queue["dead"], queue["messages"]]
    assert (found["Oldest"], found["Target"]) == ("1 m", "none")
    assert "8" in found["Processes"].split(" + ")
    for term in ("status%3Aqueued", "status%3Arunning", "status%3Adead"):
        assert f'href="/console/tasks?q=queue%3Aingest+{term}"' in card(page)
    assert "The dead-letter queue ingest.dlq in the broker has" in words(page)


def test_a_queue_is_paused_and_resumed_with_a_reason_and_its_tasks_are_woken(browser: TestClient) -> None:
    submitted(2)
    before = len(wakeups())
    place, said = sent(
        browser, POSTS[0], page=PATH, queue="ingest", starts="on", intake="on", reason=" moving the CRM "
    )
    assert place == f"{PATH}#ingest"
    assert "The queue ingest is paused: no further task starts and new tasks are refused." in said
    assert said.count("by console:ann: moving the CRM.") == 2
    (queue,) = manage("queues", "--json").json["queues"]
    assert [queue[name]["actor"] for name in ("pause", "intakePause")] == ["console:ann"] * 2
    assert queue["pause"]["reason"] == "moving the CRM"
    _, said = sent(browser, POSTS[1], page=PATH, queue="ingest", intake_only="1")
    assert "The queue ingest takes new tasks again." in said
    _, said = sent(browser, POSTS[1], page=PATH, queue="ingest")
    assert "The queue ingest is resumed; its due tasks are being woken." in said
    wait_until(lambda: len(wakeups()) == before + 1, "the due tasks are woken")
    _, said = sent(browser, POSTS[1], page=PATH, queue="ingest")
    assert "The queue ingest was not paused." in said
    (queue,) = manage("queues", "--json").json["queues"]
    assert (queue["pause"], queue["intakePause"]) == (None, None)


def test_only_the_intake_of_a_queue_can_be_paused(browser: TestClient) -> None:
    _, said = sent(browser, POSTS[0], page=PATH, queue="ingest", intake="on")
    assert "The queue ingest is paused: new tasks are refused." in said
    assert "Refuses new tasks since" in said
    (queue,) = manage("queues", "--json").json["queues"]
    assert (queue["pause"], queue["takesTasks"]) == (None, False)


def test_the_target_of_processes_is_set_within_the_bounds_and_reset(browser: TestClient) -> None:
    place, said = sent(browser, POSTS[2], page=PATH, queue="ingest", processes="6")
    assert (place, "Each prefork worker of the queue ingest gets 6 processes" in said) == (f"{PATH}#ingest", True)
    assert stats(page_of(browser, PATH))["Target"] == "6"
    for wrong in ("0", "129", "-1", "x", "", "9" * 30, "²"):
        _, said = sent(browser, POSTS[2], page=PATH, queue="ingest", processes=wrong)
        assert "1 to 128" in said, wrong
    assert manage("queues", "--json").json["queues"][0]["targetProcesses"] == 6
    _, said = sent(browser, POSTS[2], page=PATH, queue="ingest", processes="6", reset="1")
    assert "return to the number of processes that they were started with" in said
    assert manage("queues", "--json").json["queues"][0]["targetProcesses"] is None


def test_an_unknown_queue_and_a_pause_of_nothing_are_refused_with_a_sentence(browser: TestClient) -> None:
    for path in POSTS:
        _, said = sent(browser, path, page=PATH, queue="no\nwhere é", starts="on", processes="1")
        assert "There is no queue 'no\\nwhere é'" in said
    _, said = sent(browser, POSTS[0], page=PATH, queue="ingest")
    assert "Choose what the queue shall stop" in said
    assert manage("queues", "--json").json["queues"][0]["pause"] is None


def test_an_alert_and_a_queue_without_a_worker_are_said(browser: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    change_setting(monkeypatch, "INGEST_QUEUES", "ingest,lonely")
    change_setting(monkeypatch, "BACKLOG_ALERT_THRESHOLD", "2")
    change_setting(monkeypatch, "BACKLOG_POLICY", "refuse")
    submitted(3)
    check_backlog(engine(), settings.current())
    page = page_of(browser, PATH)
    assert "More than 2 tasks wait (BACKLOG_ALERT_THRESHOLD) since" in words(card(page))
    assert "New tasks are refused meanwhile." in words(card(page))
    assert "celery -A tasks worker -Q lonely" in words(card(page, "lonely"))
    assert stats(page, "lonely")["Processes"] == "–"


def test_counting_stops_at_a_ceiling_and_says_so(browser: TestClient) -> None:
    submitted(1001)
    assert stats(page_of(browser, PATH))["Due"] == "≈ 1,000"


def test_a_silent_broker_is_a_sentence_and_the_rest_of_the_page_stays(
    browser: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(1)
    assert after_commit_publisher().wait_until_idle(20)
    monkeypatch.setattr(broker, "app", Celery(broker="redis://127.0.0.1:1/0", set_as_current=False))
    page = page_of(browser, PATH)
    assert "The broker does not answer" in words(page)
    assert "ingest.dlq in the broker has an unknown number of messages" in words(page)
    assert [stats(page)[name] for name in ("Due", "In the broker")] == ["1", "unknown"]


def test_limits_show_how_many_run_of_how_many_and_who_waits_most(
    browser: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limit_use, "VALUE_CEILING", 4)
    with limited(max_running=1, rate="100/m", limit_by="tenant"):
        ids = [*for_tenant("acme", 6), *for_tenant("beta", 3), *for_tenant(XSS, 2)]
        for _ in range(3):
            admitted(ids)
        page = page_of(browser, PATH)
        (row,) = limits(page)
    assert row[:4] == [f"{TYPE} ingest", "1 at once, 100/m for each tenant", "3", "8"]
    assert row[5].startswith("acme ≈ 4 waiting, 1 running beta 2 waiting, 1 running <img")
    assert is_escaped(page)
    with limited(max_running=5):
        (row,) = limits(page_of(browser, PATH))
    assert row[1:3] == ["5 at once", "3 of 5"]


def test_values_of_a_limit_are_counted_up_to_a_ceiling(browser: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit_use, "MOST_VALUES", 7)
    monkeypatch.setattr(limit_use, "CEILING", 6)
    with limited(max_running=1, limit_by="tenant"):
        ids = [id_ for n in range(9) for id_ in for_tenant(f"tenant{n}", 2)]
        for _ in range(9):
            admitted(ids)
        (row,) = limits(page_of(browser, PATH))
    assert row[3] == "≈ 6"
    assert row[5].endswith("and at least 2 more")


def test_without_limits_the_page_says_how_to_declare_one(browser: TestClient) -> None:
    assert "No handler has a limit." in words(page_of(browser, PATH))


def test_a_reader_sees_no_form_and_no_words_of_operators_and_changes_nothing(
    reader: TestClient, browser: TestClient
) -> None:
    pause_queue(engine(), settings.current(), "ingest", actor="op@db.internal", reason="a secret move")
    page = page_of(reader, PATH)
    assert "Starts no tasks since" in words(page)
    for hidden in ("op@db.internal", "a secret move", '<button class="quiet" aria'):
        assert hidden not in page
    assert page.count("<form") == 2, "only the search and the logout"
    for path in POSTS:
        assert refuses_reader_and_foreigner(reader, browser, path, page=PATH)
    assert manage("queues", "--json").json["queues"][0]["pause"]["reason"] == "a secret move"


def test_markup_in_names_and_words_is_escaped(browser: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    registered(handler_of("a"), name=f"{XSS}:1", consumed=[XSS], ingest_queues=(XSS,))
    sent(browser, POSTS[0], page=PATH, queue=XSS, starts="on", reason=XSS)
    page = page_of(browser, PATH)
    assert page.count("onerror") > 5
    assert is_escaped(page)


def test_a_visitor_without_a_scope_for_the_ledger_is_refused(ledger: ServersOfTests) -> None:
    assert logged_in(make_token("sue", Scope.TASKS_SUBMIT)).get(PATH).status_code == 403


def test_the_age_of_the_oldest_task_is_marked_when_it_is_late(ledger: ServersOfTests, browser: TestClient) -> None:
    submitted(1)
    assert '<dd class="ok">' in card(page_of(browser, PATH))
    move(ledger, timedelta(minutes=6).total_seconds())
    assert '<dd class="bad">6 m</dd>' in card(page_of(browser, PATH))
