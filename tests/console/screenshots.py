"""Take the pictures of the documentation: `.venv/bin/python -m tests.console.screenshots [FOLDER]`.

It starts servers of its own with a ledger that looks as if it had worked for a month, and the console on a free port.
Each page is taken on a wide screen and on a phone, light and dark.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import Browser

from bench.scratch import scratch_servers
from models.engine import engine
from models.sql import sql
from settings import ROOT
from tests.api.server import Server
from tests.console.browser import PHONE, WIDE, Visit, chromium
from tests.console.demo_ledger import add_tasks, fill, give_signs_of_life

FOLDER: Final = ROOT / "docs" / "img"
SIZES: Final = {"wide": WIDE, "phone": PHONE}


def take(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with scratch_servers(), chromium() as browser:
        try:
            _take_all(browser, folder, filled=False)
            with engine().begin() as connection:
                fill(connection)
            _take_all(browser, folder, filled=True)
        finally:
            engine().dispose()


def _take_all(browser: Browser, folder: Path, *, filled: bool) -> None:
    server = Server()
    server.start()
    try:
        for size, viewport in SIZES.items():
            for scheme in ("light", "dark"):
                how: dict[str, Any] = {"viewport": viewport, "color_scheme": scheme}
                with Visit.begin(browser, server.port, **how) as visit:
                    if filled:
                        _take_overview(visit, folder / f"console-overview-{size}-{scheme}.png")
                    else:
                        visit.go("/console/login")
                        _save(visit, folder / f"console-login-{size}-{scheme}.png")
                        visit.log_in()
                        _save(visit, folder / f"console-empty-{size}-{scheme}.png")
    finally:
        server.stop()


def _take_overview(visit: Visit, path: Path) -> None:
    """Take the overview while tasks arrive, so that their pace is known."""
    visit.log_in()
    for _ in range(4):
        with engine().begin() as connection:
            give_signs_of_life(connection)
            add_tasks(connection, "mail", "mail.send", "SUCCEEDED", 3)
            connection.execute(sql("SELECT pg_stat_force_next_flush()"))
        visit.page.wait_for_timeout(800)
    _save(visit, path)


def _save(visit: Visit, path: Path) -> None:
    visit.page.screenshot(path=path, full_page=True)
    print(path, f"{path.stat().st_size / 1024:.0f} KB")  # noqa: T201


if __name__ == "__main__":
    take(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
