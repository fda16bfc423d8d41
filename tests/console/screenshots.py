"""Take the pictures of the documentation: `.venv/bin/python -m tests.console.screenshots [FOLDER]`.

It starts servers of its own with a ledger that looks as if it had worked for a month, and the console on a free port.
Each page is taken on a wide screen and on a phone, light and dark.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import Browser

import settings
from bench.scratch import scratch_servers
from models.engine import engine
from models.receipts import Level
from models.sql import sql
from receipts.receipt import Receipt
from receipts.signing import sign
from sinks.configuration import open_sinks
from tests.api.server import Server
from tests.console.browser import PHONE, WIDE, Visit, chromium
from tests.console.demo_ledger import add_tasks, fill, give_signs_of_life
from tests.console.demo_story import ACCEPTED, DESTINATIONS, tell

FOLDER: Final = settings.ROOT / "docs" / "img"
SIZES: Final = {"wide": WIDE, "phone": PHONE}
FLUSH: Final = sql("SELECT pg_stat_force_next_flush()")
TALLEST: Final = 2600  # pixels of a picture; what is below is cut off


def take(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with scratch_servers(), chromium() as browser, _configured():
        try:
            _take_all(browser, folder, {"login": "/console/login", "empty": "/console"})
            with engine().begin() as connection:
                fill(connection)
                pages = tell(connection)
            with engine().begin() as connection:
                connection.execute(FLUSH)  # otherwise the overview would count these tasks as new ones
            _take_all(browser, folder, {"overview": "/console", **pages, "receipt": "/console/receipts"})
        finally:
            engine().dispose()


@contextmanager
def _configured() -> Iterator[None]:
    """Let the settings name destinations and sinks."""
    current = settings.current()
    with tempfile.TemporaryDirectory(prefix="celeriac-pictures-") as folder:
        sinks = {
            "crm-log": {"url": current.redis_url, "guarantee": "keyed"},
            "exports": {"url": f"file://{folder}", "guarantee": "two_phase"},
        }
        os.environ |= {"OUTBOX_DESTINATIONS": json.dumps(DESTINATIONS), "SINKS": json.dumps(sinks)}
        settings.current.cache_clear()
        open_sinks().find("exports").prepare()
        yield


def _take_all(browser: Browser, folder: Path, pages: dict[str, str]) -> None:
    server = Server()
    server.start()
    try:
        for size, viewport in SIZES.items():
            for scheme in ("light", "dark"):
                how: dict[str, Any] = {"viewport": viewport, "color_scheme": scheme, "timezone_id": "UTC"}
                with Visit.begin(browser, server.port, **how) as visit:
                    for name, path in pages.items():
                        _take(visit, name, path)
                        _save(visit, folder / f"console-{name}-{size}-{scheme}.png")
    finally:
        server.stop()


def _take(visit: Visit, name: str, path: str) -> None:
    """Open a page, as it is to be seen on its picture."""
    if name in ("empty", "overview"):
        visit.log_in()
    with engine().begin() as connection:
        give_signs_of_life(connection)
    visit.go(path)
    match name:
        case "overview":
            _let_tasks_arrive(visit)
        case "receipt":
            visit.page.locator("textarea").fill(_receipt())
            visit.page.get_by_role("button", name="Check").click()
        case "queues":
            visit.page.locator("#mail details, #mail ~ details").first.evaluate("each => { each.open = true; }")
    visit.page.mouse.move(0, 0)
    visit.page.wait_for_timeout(700)


def _let_tasks_arrive(visit: Visit) -> None:
    """Let the page see some tasks arrive, so that their pace is known."""
    for _ in range(4):
        with engine().begin() as connection:
            give_signs_of_life(connection)
            add_tasks(connection, "mail", "mail.send", "SUCCEEDED", 3)
            connection.execute(FLUSH)
        visit.page.wait_for_timeout(800)


def _receipt() -> str:
    """Return the receipt that the client of the dead task got."""
    with engine().connect() as connection:
        id_, accepted_at, promised_by = connection.execute(ACCEPTED).one()
    receipt = Receipt(Level.ACCEPTED, id_, "tasks", "shop", "9f" * 32, accepted_at, promised_by, "sync-4711")
    return json.dumps(sign(receipt.fields()), indent=1)


def _save(visit: Visit, path: Path) -> None:
    height = min(TALLEST, visit.page.evaluate("document.documentElement.scrollHeight"))
    width = (visit.page.viewport_size or WIDE)["width"]
    clip: Any = {"x": 0, "y": 0, "width": width, "height": height}
    visit.page.screenshot(path=path, full_page=True, clip=clip)
    print(path, f"{path.stat().st_size / 1024:.0f} KB")  # noqa: T201


if __name__ == "__main__":
    take(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
