"""The overview: the pipeline, what needs attention, the history, and who works. The page, and its stream of changes.

The stream sends those parts of the page that have changed, as HTML, about once a second; the script puts them in place.
It ends after LONGEST_SECONDS, and the browser connects again. It sends `leave` if the session has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from api.event_streams import EventStream, event
from api.principals import sees_all
from api.tokens import Forbidden, Scope, Token
from console.attention import notices
from console.charts import draw
from console.door import PREFIX
from console.history import STEPS, History, Period
from console.overview_feed import Snapshot, overview_feed
from console.pages import render, render_part
from console.pipeline import picture
from console.pipeline_layout import Direction, lay_out
from console.visitors import READERS, LoginNeeded, Visitor, require_visitor
from models.status import TaskStatus

LONGEST_SECONDS: Final = 300.0  # of one stream
SEND_SECONDS: Final = 1.0
PARTS: Final = ("state", "attention", "pipeline", "history", "kinds", "programs")
MOST_KINDS: Final = 12
UNFINISHED: Final = (TaskStatus.QUEUED, TaskStatus.RUNNING, TaskStatus.RETRYING, TaskStatus.DEAD)


async def show(request: Request) -> Response:
    visitor = await require_visitor(request, *READERS)
    feed, period = overview_feed(), _period(request)
    snapshot, history = await feed.snapshot(), await feed.history(period)
    parts = _parts(snapshot, history, visitor.token)
    return render(request, "overview.html", {"page": "overview", "parts": parts, "period": period})


async def follow(request: Request) -> Response:
    period = _period(request)
    try:
        visitor = await require_visitor(request, *READERS)
    except (LoginNeeded, Forbidden):
        return EventStream(_leave(), seconds=0)
    feed = overview_feed()
    await feed.snapshot()  # an error here is still answered with its status
    await feed.history(period)
    stream = EventStream(_changes(visitor, period), seconds=LONGEST_SECONDS)
    stream.headers["X-Accel-Buffering"] = "no"  # for nginx, which would collect the events
    return stream


async def _changes(visitor: Visitor, period: Period) -> AsyncGenerator[str | None]:
    feed = overview_feed()
    shown: dict[str, str] = {}
    number = 0
    with feed.watch(visitor.session):
        while True:
            snapshot, history = await feed.snapshot(), await feed.history(period)
            token = feed.token_of(visitor)
            if token is None or not sees_all(token):
                async for last in _leave():
                    yield last
                return
            parts = _parts(snapshot, history, token)
            changed = {name: html for name, html in parts.items() if shown.get(name) != html}
            shown |= changed
            number += 1
            if changed:
                yield event(changed, id=number)
            yield None
            await asyncio.sleep(SEND_SECONDS)


async def _leave() -> AsyncGenerator[str | None]:
    """Tell the browser to load the page again, which shows the login page."""
    yield event({}, id=0, name="leave")


def _period(request: Request) -> Period:
    given = request.query_params.get("period", "")
    return Period(given) if given in list(Period) else Period.MINUTES


def _parts(snapshot: Snapshot, history: History, token: Token) -> dict[str, str]:
    """Return the parts of the page. Details of errors are for tokens that may operate."""
    sees_details = token.has_scope(Scope.OPERATE)
    key = (history.period, sees_details)
    return snapshot.rendered(key, lambda: _render(snapshot, history, sees_details=sees_details))


def _render(snapshot: Snapshot, history: History, *, sees_details: bool) -> dict[str, str]:
    figures = snapshot.figures
    nodes, edges = picture(figures, snapshot.arrivals)
    kinds = [each for each in figures.stats.kinds if any(each.counts[status] for status in UNFINISHED)]
    kinds.sort(key=lambda each: (-(each.oldest_due.total_seconds() if each.oldest_due else 0.0), each.queue, each.type))
    values = {
        "figures": figures,
        "is_old": snapshot.is_old,
        "notices": notices(figures, sees_details=sees_details),
        "pictures": {str(way): lay_out(nodes, edges, way) for way in Direction},
        "charts": draw(history),
        "history": history,
        "steps": STEPS,
        "kinds": kinds[:MOST_KINDS],
        "more_kinds": max(0, len(kinds) - MOST_KINDS),
    }
    return {name: render_part(f"overview/{name}.html", values) for name in PARTS}


ROUTES: Final = [Route(PREFIX, show), Route(f"{PREFIX}/events", follow)]
