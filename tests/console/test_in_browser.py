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
from tests.console.all_pages import LISTS
from tests.console.browser import PHONE, Visit, chromium
from tests.console.demo_ledger import add_tasks, fill
from tests.console.written_ledger import write_everywhere
from tests.servers import wait_until
from tests.tasks.command_line import submitted

LONG = "a-very-long-name-without-a-place-to-break-" * 3
OPEN_ALL = "document.querySelectorAll('details').forEach((each) => { each.open = true; })"
# Note what gets the focus, and how that is seen; return how many elements are to get it.
WATCH_FOCUS = """() => {
    document.querySelectorAll('details').forEach((each) => { each.open = true; });
    window.reached = [];
    window.missed = new Set([...document.querySelectorAll(
        "a[href], button, input:not([type=hidden]), select, textarea, summary, [tabindex='0']")]
        .filter((each) => each.checkVisibility()));
    document.addEventListener("focusin", ({ target }) => {
        const style = getComputedStyle(target), box = target.matches(".station") && target.querySelector("rect");
        const name = target.textContent.trim().slice(0, 30) || target.name;
        const line = box ? getComputedStyle(box).strokeWidth : `${style.outlineStyle} ${style.outlineWidth}`;
        window.reached.push([name, line]);
        window.missed.delete(target);
    });
    return window.missed.size;
}"""
SEEN = ("solid 2px", "2.5px")  # the outline of the focus; in pictures, the line around a station
MISSED = "[...window.missed].map((each) => each.outerHTML.slice(0, 100))"
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
    written = write_everywhere(LONG, owner="console")
    visit.log_in()
    visit.page.set_viewport_size(PHONE)
    for path in (*LISTS, *written.pages, "/console?period=30d", "/console/nothing", "/console/login?code=x"):
        visit.go(path)
        visit.page.evaluate(OPEN_ALL)
        wide = visit.page.evaluate("document.documentElement.scrollWidth")
        assert wide == PHONE["width"], f"{path} is {wide} wide"
    visit.complaints.clear()  # of the page that does not exist


def test_every_page_loads_itself_again_although_it_has_forms(visit: Visit) -> None:
    written = write_everywhere("a.name", owner="console")
    visit.page.clock.install()
    visit.log_in()
    count = 0
    for path in (*LISTS, *written.pages):
        visit.go(path)
        refreshed = visit.page.locator("[data-refresh]")
        if refreshed.count():
            seconds = int(refreshed.get_attribute("data-refresh") or 0)
            with visit.page.expect_response(lambda answer: answer.request.resource_type == "fetch", timeout=5000):
                visit.page.clock.run_for(1000 * seconds)
            count += 1
    assert count > 15


def test_axe_finds_nothing_wrong_with_any_page_light_or_dark(browser: Browser, server: Server) -> None:
    fill_ledger()
    written = write_everywhere("a.name", owner="console")
    with Visit.begin(browser, server.port) as visit:
        for path in ("/console/login", "/console/login?code=x"):
            visit.go(path)
            check(visit)
        visit.log_in()
        for path in (*LISTS, *written.pages, "/console/nothing"):
            visit.page.emulate_media(color_scheme="light")
            visit.go(path)
            visit.page.evaluate(OPEN_ALL)
            check(visit)
            visit.page.emulate_media(color_scheme="dark")
            check(visit, "color-contrast")
        visit.page.set_viewport_size(PHONE)
        for path in ("/console", "/console/queues", written.pages[0]):
            visit.go(path)
            check(visit)


def test_axe_finds_nothing_wrong_with_a_new_installation(visit: Visit) -> None:
    visit.log_in()
    assert visit.page.get_by_role("heading", name="First steps").is_visible()
    check(visit)


def check(visit: Visit, *only: str) -> None:
    found = Axe().run(visit.page, options={"runOnly": list(only)} if only else None)
    assert found.violations_count == 0, f"{visit.page.url}: {found.generate_report()}"


def test_everything_is_reached_with_the_keyboard_and_has_a_visible_focus(visit: Visit) -> None:
    fill_ledger()
    written = write_everywhere("a.name", owner="console")
    visit.log_in()
    for path in (*LISTS, *written.pages):
        visit.go(path)
        wanted = visit.page.evaluate(WATCH_FOCUS)
        assert wanted > 15, path
        for _ in range(wanted):
            visit.page.keyboard.press("Tab")
        reached = visit.page.evaluate("window.reached")
        assert [each for each in reached if each[1] not in SEEN] == [], path
        assert visit.page.evaluate(MISSED) == [], path
        assert reached[0][0] == "Skip to the content"
    visit.page.locator(".skip").focus()
    visit.page.keyboard.press("Enter")
    assert visit.page.evaluate("document.activeElement.id") == "content"


def test_the_slash_key_goes_to_the_search_of_every_page(visit: Visit) -> None:
    written = write_everywhere("a.name", owner="console")
    visit.log_in()
    for path in (*LISTS, *written.pages[:3]):
        visit.go(path)
        visit.page.evaluate("document.activeElement.blur()")
        visit.page.keyboard.press("/")
        assert visit.page.evaluate("document.activeElement.name") == "q", path
