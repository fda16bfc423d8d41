"""All pages and forms of the console, as its routes and its navigation have them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

from starlette.routing import Route

from console.app import console
from console.pages import NAVIGATION
from tests.console.visits import LOGIN
from tests.console.written_ledger import Written

LOGOUT: Final = "/console/logout"
NO_PAGES: Final = ("/console/events", "/console/static/{name}", "/console/tasks/{id}/text/{part}")
_ROUTES: Final = [route for route in console.routes if isinstance(route, Route)]
GETS: Final = [route.path for route in _ROUTES if "GET" in (route.methods or ()) and route.path not in NO_PAGES]
POSTS: Final = [route.path for route in _ROUTES if "POST" in (route.methods or ())]
PAGES: Final = [path for path in GETS if path != LOGIN]
# The pages of the navigation that this version has, and those that only other pages lead to.
NAVIGABLE: Final = [entry.path for entry in NAVIGATION if entry.path in GETS]
LISTS: Final = [path for path in PAGES if "{" not in path]
# Which thing each page with a placeholder is about.
_THINGS: Final = {
    "/console/tasks/": "dead",
    "/console/outbox/": "event",
    "/console/documents/": "document",
    "/console/workflows/": "workflow",
    "/console/bulk/": "bulk",
}


def address(route: str, written: Written) -> str:
    """Return the address of a route, with ids that are in the ledger."""
    if route.startswith("/console/dead/{type}"):
        path, _, query = written.group.partition("?")
        return f"{path}{route.rpartition('{fingerprint}')[2]}{'?' * bool(query)}{query}"
    thing = next((name for start, name in _THINGS.items() if route.startswith(f"{start}{{")), None)
    if thing is None:
        assert "{" not in route, f"say in tests/console/all_pages.py what {route} is about"
        return route
    return fill_in(route, {"id": str(getattr(written, thing)), "part": "payload"})


def fill_in(route: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: quote(values[found[1]], safe=""), route)
