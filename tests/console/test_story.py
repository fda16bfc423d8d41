"""The main story of the console in a real browser, with a real worker: one document succeeds, another is repaired."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, FilePayload, expect

import settings
from chaos.programs import start_worker
from child_process import ChildProcess
from tests.api.server import Server
from tests.console.browser import Visit, chromium
from tests.documents.chroma_server import ChromaServer
from tests.documents.conftest import chroma  # noqa: F401 - a fixture
from tests.servers import ServersOfTests
from tests.tasks.command_line import buried
from tests.tasks.deliveries import scalar

MILLISECONDS = 20_000
STAYS = "window.isTheSamePage = true"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def visit(browser: Browser, server: Server) -> Iterator[Visit]:
    with Visit.begin(browser, server.port) as visit:
        visit.log_in()
        yield visit
        assert visit.complaints == []


@pytest.fixture
def worker(
    stack: ServersOfTests,
    chroma: ChromaServer,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Iterator[ChildProcess]:
    """`celery -A tasks worker`, with the settings of this process, in which the API runs. One failure is the last."""
    monkeypatch.setenv("INGEST_REDIS_MAX_ATTEMPTS", "1")
    settings.current.cache_clear()
    worker = start_worker(tmp_path, "story")
    yield worker
    worker.kill()


def go_to(visit: Visit, title: str) -> None:
    """Open a page of the navigation."""
    visit.page.get_by_role("navigation", name="Pages").get_by_role("link", name=title, exact=True).click()


def upload(visit: Visit, name: str, text: str) -> None:
    """Upload a document as a person does, and mark the page that follows, so that a reload would be noticed."""
    go_to(visit, "Documents")
    file: FilePayload = {"name": name, "mimeType": "text/plain", "buffer": text.encode()}
    visit.page.get_by_label("File").set_input_files([file])
    visit.page.get_by_role("button", name="Upload").click()
    expect(visit.page.locator(".said")).to_contain_text(f"{name} was uploaded.")
    visit.page.evaluate(STAYS)


def status(visit: Visit, expected: str, place: str) -> None:
    """Wait until the page shows a status, without being loaded again."""
    found = visit.page.locator(f"{place} .status.{expected}").first
    expect(found).to_be_visible(timeout=MILLISECONDS)
    assert visit.page.evaluate("window.isTheSamePage"), "the page was not loaded again"


@pytest.mark.guarantee
def test_a_document_is_uploaded_and_found_and_one_that_dies_is_requeued_from_its_page_and_succeeds(
    worker: ChildProcess,
    visit: Visit,
    chroma: ChromaServer,  # noqa: F811
) -> None:
    worker.await_ready()
    page = visit.page
    upload(visit, "rules.txt", "Every right to write is a lease with a fence.")
    status(visit, "succeeded", ".ingestion")
    expect(page.locator(".ingestion")).to_contain_text("searchable")
    page.get_by_role("main").get_by_role("searchbox").fill("fence")
    page.keyboard.press("Enter")
    expect(page.locator("mark")).to_have_text("fence")

    chroma.answers_with = (503, "on purpose")
    upload(visit, "lost.txt", "It cannot be stored.")
    status(visit, "dead", ".ingestion")
    page.locator(".ingestion").get_by_role("link", name="task").click()
    page.evaluate(STAYS)
    status(visit, "dead", ".heading")
    expect(page.locator(".reasons")).to_contain_text("503")

    chroma.answers_with = None
    page.get_by_label("Reason").first.fill("Chroma is back")
    page.get_by_role("button", name="Requeue").click()
    expect(page.locator(".said")).to_contain_text("The task is queued again")
    page.evaluate(STAYS)
    status(visit, "succeeded", ".heading")
    expect(page.locator(".timeline")).to_contain_text("Chroma is back")
    go_to(visit, "Dead letters")
    expect(page.locator("main")).to_contain_text("No task is dead")


def test_a_thousand_dead_tasks_are_requeued_from_their_group_with_a_typed_confirmation(visit: Visit) -> None:
    buried(1000, error_message="The server answered 503.", error_code="timeout")
    buried(1, type="mail.send", error_message="No such user.")
    page = visit.page
    go_to(visit, "Dead letters")
    page.get_by_role("link", name="The server answered 503.").click()
    page.get_by_role("link", name="Requeue all 1,000 …").click()
    expect(page.locator("#preview-title")).to_have_text("1,000 tasks match")
    page.get_by_label("Reason").fill("The server is back")
    page.get_by_label("Confirm").fill("999")
    page.get_by_role("button", name="Requeue 1,000 tasks").click()
    expect(page.get_by_role("alert")).to_contain_text("Nothing was changed: type 1000 or requeue to confirm.")
    page.get_by_label("Confirm").fill("1000")
    page.get_by_role("button", name="Requeue 1,000 tasks").click()
    expect(page.locator("#progress-title")).to_have_text("1,000 of 1,000 requeued", timeout=MILLISECONDS)
    expect(page.locator("[data-state=done]")).to_be_visible(timeout=MILLISECONDS)
    expect(page.locator("main")).to_contain_text("The server is back")
    assert scalar("SELECT count(*) FROM ledger.ingest_task WHERE status = 'QUEUED'") == 1000
    assert scalar("SELECT string_agg(type, ' ') FROM ledger.ingest_task WHERE status = 'DEAD'") == "mail.send"
    visit.complaints.remove(next(each for each in visit.complaints if "422" in each))  # of the first confirmation
