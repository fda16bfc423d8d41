"""Dead letters in the console: what the groups show, muting them, and what a reader does not see."""

from __future__ import annotations

import re
from html import unescape
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from celery import Celery
from fastapi.testclient import TestClient

import settings
from api.tokens import Scope
from console import dead_letters, slow_answers
from models.engine import engine
from outbox.relay import Relay
from tasks import broker
from tasks.operations import dead_groups
from tasks.operations.dead_groups import GroupKey
from tasks.operations.dead_mutes import MuteEnd, mute_group
from tests.api.callers import make_token
from tests.console.visits import hidden_fields, logged_in, words
from tests.outbox.ledger import move
from tests.servers import ServersOfTests
from tests.tasks.command_line import DIES, FLAKY, buried, change, dead, manage
from tests.tasks.deliveries import scalar

LIST = "/console/dead"
XSS = "<img src=x onerror=alert(1)>\"'><script>alert(1)</script>&amp;"
SECRET = "connection to db.internal failed"
NO_GROUPS = "No task is dead"


@pytest.fixture
def browser(stack: ServersOfTests) -> TestClient:
    return logged_in(make_token("ann", Scope.OPERATE))


@pytest.fixture
def reader(stack: ServersOfTests) -> TestClient:
    return logged_in(make_token("rita", Scope.TASKS_READ_ALL))


def page(browser: TestClient, path: str = LIST) -> str:
    answer = browser.get(path)
    assert answer.status_code == 200, answer.text
    return str(answer.text)


def rows(text: str) -> list[str]:
    """Return the groups of the list as a person reads them, without the muted ones."""
    visible = text.partition("<details")[0]
    return [words(each) for each in re.findall(r"<tr>\s*<th scope=\"row\".*?</tr>", visible, re.DOTALL)]


def muted_rows(text: str) -> str:
    return words(text.partition("<details")[2].partition("</details>")[0])


def links(text: str) -> list[str]:
    return [unescape(each) for each in re.findall(r'href="([^"]*)"', text)]


def group_paths(text: str) -> list[str]:
    return [each for each in links(text) if each.startswith(f"{LIST}/")]


def send(browser: TestClient, group: str, action: str, **fields: str) -> Any:
    """Send a form of a group's page as a browser does, and return the page that follows."""
    path, _, query = group.partition("?")
    token = hidden_fields(page(browser, group))["form_token"]
    answer = browser.post(f"{path}/{action}{'?' * bool(query)}{query}", data={"form_token": token, **fields})
    assert answer.status_code == 303, answer.text
    assert answer.headers["location"] == group
    return page(browser, group)


def relay_once() -> None:
    relay = Relay.of(settings.current())
    relay.tick()
    relay.close()


def test_an_installation_without_dead_tasks_explains_what_they_are(browser: TestClient) -> None:
    text = words(page(browser))
    assert NO_GROUPS in text
    assert "requeue it (it runs again) or discard it (it ends)" in text
    assert "<table" not in page(browser)
    dead()
    assert NO_GROUPS not in words(page(browser))


def test_the_number_of_dead_tasks_is_the_one_of_stats(browser: TestClient, known_handlers: None) -> None:
    dead({"permanent": "no 1"}, {"permanent": "no 2"}, {"permanent": "never"})
    buried(1200, type="mail.send")
    (stats,) = [each for each in manage("stats", "--json").json["statuses"] if each["status"] == "DEAD"]
    text = page(browser)
    shown = re.findall(r"<b data-dead>([^<]*)</b>", text)
    assert shown == [f"{stats['count']:,}"] == ["1,203"]
    assert "1,203 dead tasks in 3 groups" in words(text)
    counts = [int(re.sub(r"\D", "", each)) for each in re.findall(r'<td class="n bad">([^<]*)<', text)]
    assert sorted(counts) == [1, 2, 1200]


def test_groups_are_ordered_by_their_last_death_or_by_their_count(stack: ServersOfTests, browser: TestClient) -> None:
    many = buried(5, error_message="The server answered 503.", error_code="timeout")
    change(many, "finished_at = finished_at - interval '3 hours'")
    buried(1, type="mail.send", error_message="No such user.")
    first, second = rows(page(browser))
    assert first.startswith("No such user. mail.send · handler_error")
    assert second.startswith("The server answered 503. demo.flaky · timeout")
    assert "5 3 h ago 3 h ago" in second
    assert "5 dead" in re.findall(r'aria-label="(Tasks per hour[^"]*)"', page(browser))[1]
    assert rows(page(browser, f"{LIST}?order=count"))[0].startswith("The server answered 503.")
    assert "Tasks per day in the last 30 days: 5 dead." in page(browser, f"{LIST}?period=30d")
    assert rows(page(browser, f"{LIST}?order=x&period=15m&page=-1")) == rows(page(browser)), "unknown words are ignored"


def test_every_group_is_on_one_of_the_pages(browser: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "PAGE", 2)
    for number in range(5):
        buried(1, type=f"type.{number}")
    found, path = [], LIST
    for _ in range(3):
        text = page(browser, path)
        found += [each.split("/")[3] for each in group_paths(text)]
        path = next((each for each in links(text) if f'{each}" rel="next' in unescape(text)), "")
    assert found == [f"type.{number}" for number in reversed(range(5))]
    assert not path
    assert "no further groups" in words(page(browser, f"{LIST}?page=9"))


def test_a_group_shows_its_tasks_its_traceback_and_where_to_act(browser: TestClient) -> None:
    ids = dead({"permanent": "Order 77 is gone"}, {"permanent": "Order 1204 is gone"})
    buried(1, error_message="Another error.")
    (path,) = [each for each in group_paths(page(browser)) if "Order" in page(browser, each)]
    text = page(browser, path)
    assert "Order" in words(text)
    assert "Traceback of the task that died last" in words(text)
    assert all(f"/console/tasks/{each}" in links(text) for each in ids)
    assert "Another error" not in text
    fingerprint = path.rpartition("/")[2]
    query = f"status:dead type:demo.flaky fingerprint:{fingerprint}"
    bulk = [urlsplit(each) for each in links(text) if each.startswith("/console/bulk/new")]
    assert [parse_qs(each.query) for each in bulk] == [
        {"action": ["requeue"], "q": [query]},
        {"action": ["discard"], "q": [query]},
    ]
    assert "Requeue all 2 …" in words(text)
    assert "Tasks per hour in the last 24 hours: 2 dead." in text
    assert "Tasks per day in the last 30 days: 2 dead." in page(browser, f"{path}?period=30d")


def test_a_group_whose_tasks_were_requeued_says_so(browser: TestClient) -> None:
    dead()
    (path,) = group_paths(page(browser))
    assert manage("requeue-dead", "--type", FLAKY).code == 0
    text = words(page(browser, path))
    assert "No task is dead with this error now" in text
    assert "Requeue all" not in text


@pytest.mark.parametrize("type_", ["a/b", "a b%2F?#&", "..", ".", "", "-", "none", "é\n", "a\\b", XSS], ids=repr)
def test_a_group_of_any_type_can_be_reached_and_muted(browser: TestClient, type_: str) -> None:
    """Types written by hand may have any character; submitted ones may not."""
    buried(2, type=type_)
    (path,) = group_paths(page(browser))
    assert "Requeue all 2" in (text := words(page(browser, path))) or "one by one" in text
    assert "is muted" not in text
    assert "Muted until it is unmuted" in words(send(browser, path, "mute", reason="known", until="unmuted"))
    assert scalar("SELECT type FROM ledger.dead_mute") == type_
    assert "All groups are muted." in words(page(browser))


def test_tasks_without_an_error_are_a_group(browser: TestClient) -> None:
    buried(2, error_message=None, last_error=None, error_code=None)
    (path,) = group_paths(page(browser))
    assert path == "/console/dead/demo.flaky/none"
    assert "died without an error" in words(page(browser, path))
    assert "one by one" in words(page(browser, path)), "a search cannot name this group"


def test_an_address_that_names_no_group_is_a_page(browser: TestClient) -> None:
    for path in ("/console/dead/demo.flaky/xyz", "/console/dead/demo.flaky/0123456789abcdef0", "/console/dead/x"):
        answer = browser.get(path)
        assert answer.status_code == 404, path
        assert "There is no such page" in words(answer.text)
    assert browser.get("/console/dead/-/ab?type=%00").status_code == 200


def test_a_muted_group_is_folded_away_until_it_is_unmuted(browser: TestClient) -> None:
    buried(3, type="noisy.type")
    buried(1, type="other.type")
    path = next(each for each in group_paths(page(browser)) if "noisy" in each)
    text = words(send(browser, path, "mute", reason="the bank is closed", until="unmuted"))
    assert "Muted now by console:ann, until it is unmuted: the bank is closed" in text
    assert len(rows(page(browser))) == 1
    assert "1 muted group" in muted_rows(page(browser))
    assert "noisy.type" in muted_rows(page(browser))
    assert "by console:ann, until it is unmuted: the bank is closed" in muted_rows(page(browser))
    assert "4 dead tasks in 2 groups" in words(page(browser)), "muting changes no number"
    buried(1, type="noisy.type")
    assert len(rows(page(browser))) == 1, "a new death does not end this mute"
    assert "not muted any more" in words(send(browser, path, "unmute"))
    assert len(rows(page(browser))) == 2
    assert "muted" not in words(page(browser))


def test_a_mute_until_it_happens_again_ends_with_the_next_death(browser: TestClient) -> None:
    buried(1)
    (path,) = group_paths(page(browser))
    send(browser, path, "mute", reason="known", until="next-death")
    assert rows(page(browser)) == []
    assert manage("requeue-dead", "--type", FLAKY).code == 0
    text = page(browser)
    assert NO_GROUPS in words(text)
    assert "No task is dead with this error now" in muted_rows(text), "it can still be unmuted"
    assert "Unmute" in page(browser, path)
    buried(1)
    assert len(rows(page(browser))) == 1
    assert muted_rows(page(browser)) == ""
    assert "Unmute" not in page(browser, path)


def test_a_mute_for_some_days_ends_after_them(stack: ServersOfTests, browser: TestClient) -> None:
    buried(1)
    (path,) = group_paths(page(browser))
    assert "it ends in 7 d" in words(send(browser, path, "mute", reason="known", until="days"))
    buried(1)
    assert rows(page(browser)) == []
    move(stack, 7 * 86_400 + 60)
    assert len(rows(page(logged_in(make_token("bob", Scope.OPERATE))))) == 1, "sessions ended meanwhile, too"


def test_a_mute_without_a_reason_or_an_end_is_refused(browser: TestClient) -> None:
    buried(1)
    (path,) = group_paths(page(browser))
    for fields in ({"reason": " ", "until": "unmuted"}, {"reason": "x" * 501, "until": "unmuted"}):
        assert "Say why the group is muted" in words(send(browser, path, "mute", **fields))
    assert "Choose until when" in words(send(browser, path, "mute", reason="x", until="tomorrow"))
    assert scalar("SELECT count(*) FROM ledger.dead_mute") == 0


def test_a_reader_sees_groups_but_no_details_and_no_buttons(browser: TestClient, reader: TestClient) -> None:
    buried(2, error_message=SECRET, last_error=f"Traceback: {SECRET}", error_code="timeout")
    (path,) = group_paths(page(reader))
    mute_group(engine(), GroupKey("x", "ab"), end=MuteEnd.UNMUTED, reason="the bank is closed", actor="console:ann")
    assert SECRET in page(browser)
    assert "the bank is closed" in page(browser)
    for text in (page(reader), page(reader, path)):
        assert "The task ran longer than it may." in words(text)
        for hidden in (SECRET, "Traceback", "the bank is closed", "console:ann", "/bulk/", "Mute …", "Unmute"):
            assert hidden not in text
    token = hidden_fields(page(reader))["form_token"]
    for action in ("mute", "unmute"):
        answer = reader.post(f"{path}/{action}", data={"form_token": token, "reason": "x", "until": "unmuted"})
        assert answer.status_code == 403
    assert scalar("SELECT count(*) FROM ledger.dead_mute") == 1
    limited = logged_in(make_token("wes", Scope.TASKS_SUBMIT))
    assert [limited.get(each).status_code for each in (LIST, path)] == [403, 403]


def test_a_form_without_the_token_of_the_session_is_refused(browser: TestClient) -> None:
    buried(1)
    (path,) = group_paths(page(browser))
    for action in ("mute", "unmute"):
        assert browser.post(f"{path}/{action}", data={"reason": "x", "until": "unmuted"}).status_code == 403
    assert scalar("SELECT count(*) FROM ledger.dead_mute") == 0


def test_markup_from_the_ledger_is_shown_as_text(browser: TestClient) -> None:
    buried(1, type=XSS, queue=XSS, error_message=XSS, last_error=XSS, error_code=XSS)
    buried(1, type="muted", error_message=XSS, last_error=XSS, error_code=XSS)
    muted, path = sorted(group_paths(page(browser)), key=lambda each: "muted" not in each)
    key = GroupKey("muted", muted.rpartition("/")[2])
    mute_group(engine(), key, end=MuteEnd.UNMUTED, reason=XSS, actor=XSS)
    for text in (page(browser), page(browser, path), page(browser, muted)):
        assert "onerror=alert(1)&gt;" in text
        assert text.count("&lt;script&gt;") >= 3
        assert "<img src=x" not in text
        assert len(re.findall("<script", text)) == 1


def test_the_dead_letter_queue_is_one_line_and_its_broker_may_be_unreachable(
    browser: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_answers, "KEPT_SECONDS", 0.0)
    dead(DIES)
    relay_once()
    queue = settings.current().ingest_dlq_queue
    assert f"The broker's dead-letter queue {queue} has 1 message:" in words(page(browser))
    monkeypatch.setattr(broker, "app", Celery(broker="redis://127.0.0.1:1/0", set_as_current=False))
    text = words(page(browser))
    assert f"The broker does not answer, so the length of its dead-letter queue {queue} is unknown." in text
    assert "1 dead task in 1 group" in text


def test_a_large_ledger_says_that_its_counts_are_estimates(
    browser: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    buried(30)
    buried(1, type="mail.send")
    monkeypatch.setattr(dead_groups, "CEILING", 10)
    text = words(page(browser))
    assert "≈ 11 dead tasks in 2 groups" in text or re.search(r"≈ \d+ dead tasks in 2 groups", text)
    assert "demo.flaky · handler_error" in text
    assert len(rows(page(browser))) == 2
