"""The console in a real browser: live, safe, usable with the keyboard and on a phone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]
from playwright.sync_api import Browser

from api import tokens
from console import overview, overview_feed
from models.engine import engine
from tasks.execution.deliver import deliver
from tests.api.callers import make_token
from tests.api.server import Server
from tests.console.browser import PHONE, WIDE, Visit, chromium
from tests.console.demo_ledger import add_tasks, fill
from tests.servers import wait_until
from tests.tasks.command_line import submitted

LONG = "a-very-long-name-without-a-place-to-break-" * 3
XSS = "<img src=x onerror=document.title='broken'><script>document.title='broken'</script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def visit(browser: Browser, server: Server) -> Iterator[Visit]:
    """A visit during which the browser must not complain: about a script that failed, or about the policy."""
    with Visit.begin(browser, server.port) as visit:
        yield visit
        assert visit.complaints == []


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "SEND_SECONDS", 0.2)
    monkeypatch.setattr(overview_feed, "READ_SECONDS", 0.2)


def fill_ledger(*names: str) -> None:
    with engine().begin() as connection:
        fill(connection)
        for name in names:
            add_tasks(connection, name, name, "QUEUED", 3)
            add_tasks(connection, name, name, "DEAD", 3)


def streams() -> int:
    return sum(feed.streams for feed in list(overview_feed._by_loop.values()))


def test_a_link_logs_in_and_its_code_does_not_stay_in_the_address(visit: Visit) -> None:
    visit.log_in()
    assert visit.page.url == f"http://127.0.0.1:{visit.port}/console"
    visit.page.go_back()
    assert "code" not in visit.page.url


def test_a_token_logs_in_and_logging_out_leads_back(visit: Visit) -> None:
    visit.go()
    visit.page.get_by_label("API token").fill(make_token("ann", "operate"))
    visit.page.keyboard.press("Enter")
    visit.page.get_by_role("heading", name="Overview").wait_for()
    visit.page.get_by_role("button", name="Log out").click()
    visit.page.get_by_label("API token").wait_for()


@pytest.mark.usefixtures("quickly")
def test_numbers_change_without_loading_the_page_again_and_focus_stays(visit: Visit) -> None:
    visit.log_in()
    visit.page.evaluate("window.isTheSamePage = true")
    ids = submitted({}, {}, {})
    visit.wait_for_figure("QUEUED", "3")
    visit.page.get_by_role("link", name="24 hours").focus()
    deliver(engine(), ids)
    visit.wait_for_figure("SUCCEEDED", "3")
    assert visit.figure("QUEUED") == "0"
    assert visit.page.evaluate("window.isTheSamePage")
    assert visit.page.evaluate("document.activeElement.textContent") == "24 hours"


@pytest.mark.usefixtures("quickly")
def test_a_hidden_tab_closes_its_stream_and_opens_it_when_it_is_seen_again(visit: Visit) -> None:
    visit.log_in()
    wait_until(lambda: streams() == 1, "the page follows")
    for is_hidden, expected in ((True, 0), (False, 1)):
        visit.page.evaluate(
            """(isHidden) => {
                Object.defineProperty(document, "hidden", {value: isHidden, configurable: true});
                document.dispatchEvent(new Event("visibilitychange"));
            }""",
            is_hidden,
        )
        wait_until(lambda expected=expected: streams() == expected, f"{expected} streams are open")  # type: ignore[misc]
    submitted({})
    visit.wait_for_figure("QUEUED", "1")


@pytest.mark.usefixtures("quickly")
def test_a_page_whose_session_has_ended_shows_the_login(visit: Visit) -> None:
    make_token("ann", "operate")
    visit.log_in("ann")
    wait_until(lambda: streams() == 1, "the page follows")
    with engine().begin() as connection:
        tokens.revoke(connection, "ann")
    visit.page.get_by_label("API token").wait_for(timeout=20_000)


def test_a_page_that_has_lost_its_connection_says_so(browser: Browser, server: Server) -> None:
    with Visit.begin(browser, server.port) as visit:
        visit.log_in()
        wait_until(lambda: streams() == 1, "the page follows")
        assert not visit.page.locator(".lost").is_visible()
        server.stop()
        visit.page.locator(".lost").wait_for(state="visible", timeout=20_000)


def test_markup_in_names_does_not_run(visit: Visit) -> None:
    fill_ledger(XSS)
    visit.log_in()
    assert visit.page.get_by_role("row").filter(has_text="<script>").count() == 1
    submitted({})
    visit.page.get_by_role("row").filter(has_text="demo.flaky").wait_for()
    assert visit.page.title() == "Overview · Celeriac"
    assert visit.page.locator("main img, main script").count() == 0


def test_no_page_is_wider_than_a_phone(visit: Visit) -> None:
    fill_ledger(LONG)
    visit.log_in()
    visit.page.set_viewport_size(PHONE)
    for path in ("/console", "/console?period=30d", "/console/nothing", "/console/login?code=x"):
        visit.go(path)
        wide = visit.page.evaluate("document.documentElement.scrollWidth")
        assert wide == PHONE["width"], f"{path} is {wide} wide"
    visit.complaints.clear()  # of the page that does not exist


def test_axe_finds_nothing_wrong_with_any_page_light_or_dark(browser: Browser, server: Server) -> None:
    fill_ledger()
    with Visit.begin(browser, server.port) as visit:
        for path in ("/console/login", "/console/login?code=x"):
            visit.go(path)
            check(visit)
        visit.log_in()
        check(visit)
        visit.page.emulate_media(color_scheme="dark")
        check(visit)
        visit.page.set_viewport_size(PHONE)
        check(visit)
        visit.go("/console/nothing")
        check(visit)


def test_axe_finds_nothing_wrong_with_a_new_installation(visit: Visit) -> None:
    visit.log_in()
    assert visit.page.get_by_role("heading", name="First steps").is_visible()
    check(visit)


def check(visit: Visit) -> None:
    found = Axe().run(visit.page)
    assert found.violations_count == 0, found.generate_report()


def test_everything_is_reached_with_the_keyboard_and_has_a_visible_focus(visit: Visit) -> None:
    fill_ledger()
    visit.log_in()
    visit.page.set_viewport_size(WIDE)
    wanted = visit.page.locator("a:visible, button:visible, input:visible, [tabindex='0']:visible").count()
    reached: list[str] = []
    for _ in range(wanted):
        visit.page.keyboard.press("Tab")
        name, outline = visit.page.evaluate(
            """() => {
                const focused = document.activeElement, style = getComputedStyle(focused);
                return [focused.textContent.trim().slice(0, 20), `${style.outlineStyle} ${style.outlineWidth}`];
            }"""
        )
        assert outline == "solid 2px", name
        reached.append(name)
    assert len(set(reached)) == wanted
    assert reached[0] == "Skip to the content"
    assert {"Overview", "Log out", "24 hours"} <= set(reached)
    visit.page.keyboard.press("Tab")
    visit.page.locator(".skip").focus()
    visit.page.keyboard.press("Enter")
    assert visit.page.evaluate("document.activeElement.id") == "content"
