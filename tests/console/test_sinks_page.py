"""The sinks' page shows guarantees, health and transactions in doubt; its only button obeys the ledger's decisions."""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import Engine

from api.tokens import Scope
from console import sinks, slow_answers
from models.engine import engine
from models.sql import sql
from sinks.configuration import open_sinks
from tests.api.callers import make_token
from tests.console.forms import XSS, is_escaped, page_of, refuses_reader_and_foreigner, sent
from tests.console.visits import logged_in, words
from tests.servers import ServersOfTests
from tests.sinks.conftest import configure, other, other_database  # noqa: F401 - fixtures
from tests.sinks.places import TwoPhasePlace
from tests.sinks.test_conformance import writing
from tests.tasks.deliveries import handled, scalar, submitted
from tests.tasks.lost_workers import killed, reclaim_lost
from tests.tasks.outside import TYPE

PATH = "/console/sinks"
NOWHERE = {"url": "postgresql://me:hunter2@127.0.0.1:1/none", "guarantee": "keyed"}
LEDGER = {"url": "ledger:", "guarantee": "atomic"}


@pytest.fixture(autouse=True)
def _answers_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_answers, "KEPT_SECONDS", 0.0)


@pytest.fixture
def browser(ledger: ServersOfTests) -> TestClient:
    return logged_in(make_token("ann", Scope.OPERATE))


@pytest.fixture
def reader(ledger: ServersOfTests) -> TestClient:
    return logged_in(make_token("eve", Scope.TASKS_READ_ALL))


@pytest.fixture
def place(other: Engine, configure: Callable[..., None]) -> Iterator[TwoPhasePlace]:  # noqa: F811
    """A two-phase sink, and a handler that writes to it."""
    made = TwoPhasePlace(other)
    configure(place=made.setting, ledger=LEDGER)
    with handled(TYPE, writing(made), transactional=False, backoff=[0]):
        yield made


def task_that_died(window: str) -> uuid.UUID:
    (id_,) = submitted(1, TYPE)
    killed([id_], f"{window}=kill")
    return id_


def cells(page: str, title: str) -> list[list[str]]:
    table = page.partition(f'aria-labelledby="{title}" tabindex')[2].partition("</table>")[0].partition("<tbody>")[2]
    rows = re.findall(r"<tr.*?</tr>", table, re.DOTALL)
    return [[words(cell) for cell in re.findall(r"<t[hd].*?</t[hd]>", row, re.DOTALL)] for row in rows]


def insert(**columns: Any) -> None:
    given = {"gid": str(uuid.uuid4()), "task_id": uuid.uuid4(), "sink": "place", **columns}
    names = ", ".join(given)
    statement = f"INSERT INTO ledger.sink_transaction ({names}) VALUES ({', '.join(f':{name}' for name in given)})"
    with engine().begin() as connection:
        connection.execute(sql(statement), given)


def test_each_sink_shows_guarantee_health_and_conditions(
    place: TwoPhasePlace,
    configure: Callable[..., None],  # noqa: F811
    browser: TestClient,
    reader: TestClient,
) -> None:
    configure(place=place.setting, ledger=LEDGER, nowhere=NOWHERE)
    page = page_of(browser, PATH)
    found = {row[0]: row for row in cells(page, "sinks-title")}
    assert found["ledger"][1:3] == ["atomic commits together with SUCCEEDED", "ready the ledger's own database"]
    assert found["place"][2].startswith("ready 0 of ")
    assert found["nowhere"][2].startswith("not ready PostgreSQL at 127.0.0.1:1 is unreachable")
    assert found["nowhere"][1].startswith("keyed a repetition finds the key of the effect; keys are kept for 30 d")
    assert "1 condition The effect is in the ledger's database" in found["ledger"][5]
    assert [name for name, row in found.items() if "Recover now" in row[-1]] == ["place"]
    assert "hunter2" not in page
    seen = page_of(reader, PATH)
    assert ("127.0.0.1" in seen, "not ready It does not answer, or lacks something." in words(seen)) == (False, True)


def test_a_sink_that_hangs_delays_the_page_by_its_patience_only_and_is_asked_once(
    place: TwoPhasePlace, browser: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, asked = threading.Event(), []
    sink = open_sinks().find("place")

    def check(_sink: object) -> str:
        asked.append(1)
        release.wait(20)
        return "late"

    monkeypatch.setattr(type(sink), "check", check)
    try:
        for _ in range(2):
            found = {row[0]: row[2] for row in cells(page_of(browser, PATH), "sinks-title")}
            assert found["place"] == "not ready It did not answer within 0.5 s."
            assert found["ledger"].startswith("ready")
        assert len(asked) == 1
    finally:
        release.set()


def test_transactions_in_doubt_are_finished_as_the_ledger_has_decided(
    place: TwoPhasePlace, ledger: ServersOfTests, browser: TestClient
) -> None:
    decided, undecided = task_that_died("sinks.before_commit"), task_that_died("sinks.before_decision")
    rows = cells(page_of(browser, PATH), "doubt-title")
    assert [row[1:4] for row in rows] == [
        ["place", f"{str(decided)[-12:]} {TYPE}", "commit"],
        ["place", f"{str(undecided)[-12:]} {TYPE}", "undecided"],
    ]
    assert rows[0][5].startswith("The effect counts. Recovery commits it")
    assert rows[1][5] == "Its attempt is running and decides when it is settled."
    reclaim_lost(ledger)
    rows = cells(page_of(browser, PATH), "doubt-title")
    assert {row[3] for row in rows} <= {"commit", "abort", "undecided"}
    assert f'href="/console/tasks/{decided}"' in page_of(browser, PATH)
    _, text = sent(browser, f"{PATH}/recover", page=PATH, sink="place")
    assert re.search(r"Recovery of place: .*1 committed; 1 aborted\.|Recovery of place:", text)
    assert "No transaction is in doubt" in text
    assert scalar("SELECT array_agg(DISTINCT state ORDER BY state) FROM ledger.sink_transaction") == [
        "aborted",
        "committed",
    ]
    assert (place.count(decided), place.count(undecided), place.left_behind()) == (1, 0, [])
    _, text = sent(browser, f"{PATH}/recover", page=PATH)
    assert "Recovery: nothing was left to do." in text


def test_recovery_of_one_sink_leaves_those_of_others(place: TwoPhasePlace, browser: TestClient) -> None:
    insert(sink="gone", decision="commit", decided_at="2026-01-01", state="prepared")
    insert(decision="commit", decided_at="2026-01-01", state="prepared", handle=f'{{"gid": "{uuid.uuid4()}"}}')
    found = {row[0]: row for row in cells(page_of(browser, PATH), "sinks-title")}
    assert "SINKS of the API does not name it" in found["gone"][1]
    assert (found["gone"][3], found["place"][3]) == ("1", "1")
    _, text = sent(browser, f"{PATH}/recover", page=PATH, sink="place")
    assert "Recovery of place: 1 committed." in text
    assert scalar("SELECT sink FROM ledger.sink_transaction WHERE state = 'prepared'") == "gone"
    assert "There is no sink 'gone' in SINKS" in sent(browser, f"{PATH}/recover", page=PATH, sink="gone")[1]


def test_a_recovery_that_takes_long_goes_on_and_the_page_says_so(
    place: TwoPhasePlace, browser: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    insert(decision="commit", decided_at="2026-01-01", state="prepared", handle=f'{{"gid": "{uuid.uuid4()}"}}')
    sink_type: Any = type(open_sinks().find("place"))
    list_prepared = sink_type.list_prepared

    def list_late(sink: Any, prefix: str) -> Any:
        release.wait(20)
        return list_prepared(sink, prefix)

    monkeypatch.setattr(sinks, "RECOVERY_SECONDS", 0.05)
    monkeypatch.setattr(sink_type, "list_prepared", list_late)
    try:
        assert "and goes on" in sent(browser, f"{PATH}/recover", page=PATH)[1]
    finally:
        release.set()
    monkeypatch.setattr(sinks, "RECOVERY_SECONDS", 5.0)
    sent(browser, f"{PATH}/recover", page=PATH)
    assert scalar("SELECT state FROM ledger.sink_transaction") == "committed"


def test_what_a_sink_refused_is_named_for_operators(
    place: TwoPhasePlace, browser: TestClient, reader: TestClient
) -> None:
    insert(gid="celeriac:x:1", decision="commit", decided_at="2026-01-01", state="failed")
    ((*_, fate),) = cells(page_of(browser, PATH), "doubt-title")
    assert "The sink refused to obey" in fate
    assert "celeriac:x:1" in fate
    assert "celeriac:x:1" not in page_of(reader, PATH), "the name has the token of the attempt"


def test_a_reader_has_no_button_and_is_refused(place: TwoPhasePlace, browser: TestClient, reader: TestClient) -> None:
    insert(decision="commit", decided_at="2026-01-01", state="prepared")
    assert "Recover" in words(page_of(browser, PATH))
    assert "<button" not in page_of(reader, PATH).partition("<main")[2]
    assert refuses_reader_and_foreigner(reader, browser, f"{PATH}/recover", page=PATH)
    assert scalar("SELECT state FROM ledger.sink_transaction") == "prepared"


def test_markup_is_shown_as_text(place: TwoPhasePlace, browser: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_sink: object) -> str:
        raise RuntimeError(XSS)

    monkeypatch.setattr(type(open_sinks().find("place")), "check", fail)
    insert(sink=XSS[:80], gid=XSS, decision="abort", decided_at="2026-01-01", state="failed")
    page = page_of(browser, PATH)
    assert is_escaped(page)
    assert page.count("&lt;img") >= 4


def test_without_sinks_the_page_says_how_to_name_one(reader: TestClient) -> None:
    assert "SINKS is empty" in words(page_of(reader, PATH))
