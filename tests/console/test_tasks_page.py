"""The list of tasks: its links lead to all tasks and to no other, and it shows each visitor only what it may see."""

from __future__ import annotations

import re
import uuid
from html import unescape
from typing import Any
from urllib.parse import parse_qs, quote_plus, urlsplit

import pytest
from fastapi.testclient import TestClient

from api.tokens import Scope
from console import tasks
from models.engine import engine
from tasks.execution.deliver import deliver
from tasks.operations import task_search
from tests.api.callers import make_token
from tests.console.demo_ledger import KINDS, add_tasks
from tests.console.forms import XSS, is_escaped, page_of
from tests.console.visits import logged_in, words
from tests.servers import ServersOfTests
from tests.tasks.command_line import FLAKY, buried, change, submitted
from tests.tasks.deliveries import statements

LIST = "/console/tasks"
SECRET = "connection to db.internal failed"


@pytest.fixture
def browser(stack: ServersOfTests) -> TestClient:
    return logged_in(make_token("ann", Scope.OPERATE))


@pytest.fixture
def reader(stack: ServersOfTests) -> TestClient:
    return logged_in(make_token("eve", Scope.TASKS_READ_ALL))


def searched(browser: TestClient, q: str = "", **parameters: str) -> str:
    """Return the page for a search."""
    return page_of(browser, address(q, **parameters))


def address(q: str, **parameters: str) -> str:
    return f"{LIST}?" + "&".join(f"{name}={quote_plus(value)}" for name, value in {"q": q, **parameters}.items())


def refused(browser: TestClient, q: str, **parameters: str) -> tuple[int, str]:
    """Return the status and the words of a page that refuses a search; it keeps what was typed."""
    answer = browser.get(address(q, **parameters))
    assert f'value="{q}"' in unescape(answer.text)
    assert "How to search" in words(answer.text)
    assert "data-refresh" not in answer.text
    return answer.status_code, words(answer.text)


def content(page: str) -> str:
    return page.partition('<main id="content"')[2]


def rows(page: str) -> list[str]:
    """Return the tasks of the page as a person reads them."""
    found = re.findall(r"<tr>\s*<th scope=\"row\".*?</tr>", page, re.DOTALL)
    return [words(each) for each in found]


def ids(page: str) -> list[str]:
    return re.findall(r'<th scope="row"><a class="id" href="/console/tasks/([^"]+)"', page)


def links(page: str) -> dict[str, str]:
    """Return the addresses of the links by their text or, if they have one, by their label."""
    found = re.findall(r'<a (?:class="[^"]*" )?href="([^"]*)"([^>]*)>(.*?)</a>', content(page), re.DOTALL)
    return {
        unescape(re.search(r'aria-label="([^"]*)"', more)[1] if "aria-label" in more else words(text)): unescape(path)  # type: ignore[index]
        for path, more, text in found
    }


def tabs(page: str) -> dict[str, str]:
    """Return the statuses to choose from, with the search of each."""
    part = page.partition('aria-label="Status"')[2].partition("</nav>")[0]
    return {text: query_of(unescape(path)) for path, text in re.findall(r'href="([^"]*)"[^>]*>([^<]*)<', part)}


def query_of(path: str) -> str:
    return parse_qs(urlsplit(path).query).get("q", [""])[0]


def acts(page: str) -> dict[str, str]:
    """Return the search of each bulk action that is offered."""
    found = [parse_qs(urlsplit(path).query) for path in links(page).values() if path.startswith("/console/bulk/new?")]
    return {each["action"][0]: each["q"][0] for each in found}


def demo_tasks() -> None:
    with engine().begin() as connection:
        for queue, type_, *counts in KINDS:
            for status, count in zip(("QUEUED", "RUNNING", "RETRYING", "DEAD", "SUCCEEDED"), counts, strict=True):
                add_tasks(connection, queue, type_, status, min(count, 8))


def test_an_installation_without_tasks_says_so(browser: TestClient) -> None:
    page = searched(browser)
    assert "The ledger has no tasks" in words(page)
    assert "<table" not in page
    assert searched(browser, q="") == page_of(browser, LIST) == page


def test_without_a_search_all_tasks_are_listed_the_latest_change_first(browser: TestClient) -> None:
    (first,) = submitted({}, key="order 7", partition_key="customer 4", max_attempts=3)
    (died,) = buried(1, type="mail.send", queue="mail", attempt_count=10, error_message="The server answered 503.")
    change([died], "finished_at = finished_at - interval '2 hours', created_at = created_at - interval '2 days'")
    shown = searched(browser)
    assert ids(shown) == [str(first), str(died)]
    waits, dead = rows(shown)
    assert re.fullmatch(
        rf"{str(first)[-12:]} queued {FLAKY} ingest order 7 partition customer 4 0 of 3 .*(now|ago)", waits
    )
    assert "dead mail.send mail 10 of 10 The server answered 503. handler_error 2 d ago 2 h ago" in dead
    assert 'aria-sort="descending"' in shown
    assert ids(page_of(browser, links(shown)["Last change ↓"])) == [str(died), str(first)]
    assert "Key" not in words(searched(browser, "type:mail.send")).partition("Task Status")[2], "no task has one"


def test_a_search_of_terms_lists_what_matches_and_each_term_can_be_removed(browser: TestClient) -> None:
    demo_tasks()
    page = searched(browser, 'type:crm.sync status:dead error:handler_error text:"answered 503"')
    assert len(ids(page)) == 6
    assert all("dead crm.sync crm" in each for each in rows(page))
    terms = ["type:crm.sync", "status:dead", "error:handler_error", 'text:"answered 503"']
    removed = {text: query_of(path) for text, path in links(page).items() if text.startswith("Remove ")}
    assert list(removed) == [f"Remove {term}" for term in terms]
    assert removed["Remove status:dead"] == 'type:crm.sync error:handler_error text:"answered 503"'
    assert 'value="type:crm.sync status:dead' in page
    without = searched(browser, removed["Remove status:dead"])
    assert len(ids(without)) == 6 + 8


def test_a_tab_replaces_the_status_and_keeps_the_other_terms_and_the_order(browser: TestClient) -> None:
    demo_tasks()
    page = searched(browser, "status:dead type:crm.sync", order="oldest")
    assert tabs(page)["Retrying"] == "type:crm.sync status:retrying"
    assert tabs(page)["All"] == "type:crm.sync"
    assert re.findall(r'aria-current="true">([^<]*)<', page) == ["Dead"]
    assert 'aria-sort="ascending"' in page_of(browser, links(page)["Retrying"])
    for status in ("Queued", "Running", "Retrying", "Succeeded", "Dead", "Discarded"):
        shown = searched(browser, tabs(page)[status])
        assert all(f" {status.lower()} " in row for row in rows(shown))
        assert bool(rows(shown)) is (status != "Discarded")
    assert "Dead or retrying" in tabs(searched(browser, "error:timeout"))


@pytest.mark.parametrize("order", ["", "oldest"])
def test_the_links_to_other_pages_lead_through_all_tasks_and_back(
    browser: TestClient, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    monkeypatch.setattr(tasks, "PAGE", 7)
    demo_tasks()
    path, pages = address("type:mail.send", order=order), []
    on, back = ("Newer →", "← Older") if order else ("Older →", "← Newer")
    while path:
        pages.append(page_of(browser, path))
        path = links(pages[-1]).get(on, "")
    found = [each for page in pages for each in ids(page)]
    assert len(found) == len(set(found)) == 28
    assert len(pages) == 4
    assert ids(page_of(browser, links(pages[1])[back])) == ids(pages[0])
    assert ["data-refresh" in page for page in pages] == [True, False, False, False]
    assert back not in links(pages[0])


def test_a_page_that_ended_at_the_ceiling_says_how_far_it_has_read_and_goes_on(
    browser: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rare,) = buried(1, type="rare")
    change([rare], "finished_at = finished_at - interval '2 hours'")
    buried(30)
    monkeypatch.setattr(tasks, "search", _with_ceiling(20))
    page = searched(browser, "type:rare status:dead")
    assert "More tasks may match: this page has read the tasks back to 2" in words(page)
    assert "No task matches" not in words(page)
    assert f'data-refresh="{tasks.REFRESH_LONG_SECONDS}"' in page
    assert acts(page).keys() == {"requeue", "discard"}, "there may be more"
    page = page_of(browser, links(page)["Go on"])
    assert ids(page) == [str(rare)]
    assert "More tasks may match" not in words(page)
    page = page_of(browser, links(searched(browser, "type:rare", order="oldest"))["Newer →"])
    assert "There are no tasks beyond this place" in words(page)
    assert ids(page_of(browser, links(page)["Go to the first page"])) == [str(rare)]


def _with_ceiling(ceiling: int) -> Any:
    return lambda *positional, **how: task_search.search(*positional, **how, ceiling=ceiling)


def test_a_search_that_finds_nothing_says_what_to_do(browser: TestClient) -> None:
    buried(1)
    page = searched(browser, "type:mail.send status:dead")
    assert "No task matches" in words(page)
    assert links(page)["show all tasks"] == LIST
    assert tabs(page)["All"] == "type:mail.send"
    assert acts(page) == {}


def test_words_are_understood_and_the_page_says_how(browser: TestClient) -> None:
    (waits,) = submitted({}, key="order 7")
    (died,) = buried(1, error_message="No such file")
    for text, id_, sentence in (
        ("DEAD", died, "“dead” is a status: status:dead"),
        (f"{FLAKY} status:queued", waits, f"“{FLAKY}” is a type of task: type:{FLAKY}"),
        ("order 7", waits, '“order 7” is the idempotency key of a task: key:"order 7"'),
        ("such FILE", died, 'so it is searched for in error messages: text:"such FILE"'),
        (f"{died} status:dead", died, f"is the id of a task: id:{died}"),
    ):
        page = searched(browser, text)
        assert ids(page) == [str(id_)], text
        assert sentence in words(page)
        assert f'value="{text}"' in page, "the box keeps what was typed"
    assert "understood" not in searched(browser, "status:dead")
    offered = acts(searched(browser, "such file"))
    assert set(offered.values()) == {'text:"such file"'}, "an action gets the search as it was understood"


def test_an_id_alone_leads_to_its_task(browser: TestClient) -> None:
    for id_ in (submitted({})[0], uuid.uuid4()):
        answer = browser.get(address(f" {str(id_).upper()} "))
        assert (answer.status_code, answer.headers["location"]) == (303, f"{LIST}/{id_}")


def test_a_key_that_looks_like_an_id_is_found_unless_it_is_the_id_of_a_task(browser: TestClient) -> None:
    (plain,) = submitted({})
    key = str(uuid.uuid4()).upper()
    (keyed,) = submitted({}, key=key)
    answer = browser.get(address(key))
    assert answer.status_code == 303
    assert query_of(answer.headers["location"]) == f"key:{key}"
    assert ids(page_of(browser, answer.headers["location"])) == [str(keyed)]
    submitted({}, key=str(plain))
    assert browser.get(address(str(plain))).headers["location"] == f"{LIST}/{plain}"


@pytest.mark.parametrize(
    ("q", "parameters", "sentence"),
    [
        ("typ:a", {}, "There is no term typ:"),
        ('text:"no such', {}, "A quote is not closed"),
        ("status:broken", {}, "There is no status 'broken'"),
        ("since:1h until:2h", {}, "so no task can match"),
        ("x" * 3000, {}, "has 3,000 characters"),
        ("a\x00b", {}, "cannot be written"),
        (XSS, {"before": XSS}, "is not a cursor"),
        (f"status:{XSS}", {}, "There is no status"),
        ("", {"after": "2026-11-16T10:00:00Z_7"}, "is not a cursor"),
        ("", {"before": f"0001-01-01T00:00:00+23:00_{uuid.uuid4()}"}, "is not a cursor"),
    ],
)
def test_a_search_that_cannot_be_made_is_a_page_that_keeps_it(
    browser: TestClient, q: str, parameters: dict[str, str], sentence: str
) -> None:
    status, said = refused(browser, q, **parameters)
    assert status == 400
    assert sentence in said
    assert "This search cannot be made" in said


def test_bulk_actions_are_offered_where_they_can_change_something(browser: TestClient, reader: TestClient) -> None:
    demo_tasks()
    buried(1, type="died")
    for q, verbs in (
        ("status:dead", {"requeue", "discard"}),
        ("status:retrying", {"run-now", "discard"}),
        ("status:queued", {"run-now", "discard"}),
        ("status:queued,dead", {"requeue", "run-now", "discard"}),
        ("type:died", {"requeue", "run-now", "discard"}),
        ("status:running", set()),
        ("status:succeeded,discarded", set()),
        ("type:unknown", set()),
        ("", set()),
    ):
        assert acts(searched(browser, q)) == dict.fromkeys(verbs, q), q
        assert acts(searched(reader, q)) == {}, q
    assert "discard" in acts(searched(browser, "status:dead", order="oldest"))


def test_a_reader_sees_no_words_of_errors_and_cannot_search_for_them(browser: TestClient, reader: TestClient) -> None:
    (id_,) = buried(1, error_message=SECRET, last_error=f"Traceback: {SECRET}", error_code="timeout")
    assert SECRET in searched(browser, "text:internal")
    for q in ("", "status:dead", "error:timeout"):
        page = searched(reader, q)
        assert ids(page) == [str(id_)]
        assert "The task ran longer than it may. timeout" in rows(page)[0]
        assert SECRET not in page
        assert "text:" not in page
    answers = set()
    for guess in ("internal", "external", "connection to", "nothing like it"):
        for q in (f'text:"{guess}"', guess, f'status:dead text:"{guess}"'):
            status, said = refused(reader, q)
            assert status == 403
            assert "The token eve lacks the scope operate" in said
            assert SECRET not in said
            answers.add(said.replace(q, "").replace(guess, ""))
    assert len(answers) == 1, "a right guess and a wrong one are answered alike"


def test_a_visitor_without_the_scope_and_one_without_a_session_see_nothing(
    stack: ServersOfTests, guest: TestClient
) -> None:
    (id_,) = buried(1)
    limited = logged_in(make_token("wes", Scope.TASKS_READ))
    for path in (LIST, address("status:dead"), address(str(id_)), address("typ:x")):
        answer = limited.get(path)
        assert answer.status_code == 403
        assert str(id_) not in answer.text.replace(path, "")
        assert guest.get(path).headers["location"] == "/console/login"


def test_markup_in_searches_and_tasks_is_shown_as_text(browser: TestClient, reader: TestClient) -> None:
    (id_,) = buried(1, type=XSS, queue=XSS, error_message=XSS, last_error=XSS, error_code=XSS, idempotency_key=XSS)
    change([id_], "partition_key = :xss, key_seq = 1", xss=XSS)
    for visitor in (browser, reader):
        page = searched(visitor)
        assert is_escaped(page)
        of_task = {unescape(each) for each in re.findall(r'href="([^"]*onerror[^"]*)"', page)}
        assert len(of_task) == 2, "the searches for its type and its queue"
        for path in of_task:
            found = page_of(visitor, path)
            assert ids(found) == [str(id_)]
            assert is_escaped(found)
    for q in (XSS, f'text:"{XSS}', f"typ:{XSS}", "key:'><script>alert(1)</script>", '"<img src=x onerror=alert(1)>"'):
        answer = browser.get(address(q))
        assert "<img src=x" not in answer.text
        assert "<script>" not in answer.text


def test_each_example_of_the_help_works(browser: TestClient, reader: TestClient) -> None:
    submitted({})
    part = searched(browser).partition("How to search")[2].partition("</details>")[0]
    examples = {words(text): unescape(path) for path, text in re.findall(r'<a href="([^"]*)">(.*?)</a>', part)}
    assert list(examples) == [example for example, _ in tasks.HELP]
    for example, path in examples.items():
        assert query_of(path) == example
        page_of(browser, path)
        if not example.startswith("text:"):
            page_of(reader, path)


def test_a_page_asks_few_questions_however_many_tasks_it_shows(browser: TestClient) -> None:
    demo_tasks()
    for q, most in (("", 4), ("status:dead,retrying type:crm.sync since:2h", 4), ("no such words", 8)):
        searched(browser, q)
        with statements() as said:
            searched(browser, q)
        assert len(said) <= most, said


def test_the_list_follows_a_task_that_runs(browser: TestClient) -> None:
    ids_ = submitted({})
    assert " queued " in rows(searched(browser))[0]
    deliver(engine(), ids_)
    page = searched(browser)
    assert " succeeded " in rows(page)[0]
    assert 'data-refresh="3"' in page


def test_a_task_that_is_due_later_says_when(browser: TestClient) -> None:
    (id_,) = submitted({})
    change([id_], "next_retry_at = (SELECT ledger.ledger_now()) + interval '2 hours'")
    page = searched(browser, f"id:{id_}")
    assert "queued due in 2 h" in rows(page)[0]
