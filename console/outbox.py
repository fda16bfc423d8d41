"""The outbox: each destination with its backlog and whether it answers, lists of events, one event, and dead events.

Readers see no payloads, errors, reasons and names of processes; only operators requeue or discard dead events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from urllib.parse import urlencode

from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import settings
from api.errors import NotFound
from api.ledger_calls import call_ledger
from api.tokens import Scope
from console import destination_conditions
from console.answers import changed, go_to
from console.destination_conditions import Destination
from console.door import PREFIX
from console.pages import render
from console.visitors import READERS, Visitor, require_form, require_visitor
from models.clock import now
from models.driver_values import storable
from models.engine import engine
from models.errors import Misuse
from models.status import EventStatus
from outbox import dead_events, event_pages
from outbox.dead_events import Choice, DeadCount
from outbox.dead_rows import Counted
from outbox.destination_states import CEILING, read_destination_states
from outbox.event_pages import LARGEST_ID, EventPage, Kind, StoredEvent, read_event, read_page
from tally.totals import read_pace
from tasks.operations.pauses import read_pauses
from tasks.operations.signs_of_life import TickLife, read_ticks

HOME: Final = f"{PREFIX}/outbox"
CHANGE_SECONDS: Final = 2.5  # that one form may take; less than the patience of `call_ledger`
LONGEST_REASON: Final = 500
MOST_TASKS: Final = 20  # of a wake-up that are shown
LISTS: Final = {Kind.WAITING: "Waiting", Kind.RETRYING: "Retrying", Kind.DEAD: "Dead", Kind.SENT: "Sent"}


@dataclass(frozen=True, slots=True)
class Act:
    """What a button does with dead events."""

    done: str
    change: Callable[..., Iterator[list[int]]]


ACTS: Final = {"requeue": Act("requeued", dead_events.requeue), "discard": Act("discarded", dead_events.discard)}


@dataclass(frozen=True, slots=True)
class Chosen:
    """The list that the address names."""

    kind: Kind = Kind.WAITING
    destination: str | None = None
    error: str | None = None  # part of the error of dead events; for operators
    before: int = LARGEST_ID

    def address(self, *, kind: Kind | None = None, before: int | None = None) -> str:
        """Return the address of this list, of another list, or of another page of this one."""
        kind = kind or self.kind
        values = {"destination": self.destination, "status": kind.value, "before": before}
        if kind is Kind.DEAD:
            values["error"] = self.error
        return f"{HOME}?{urlencode({name: value for name, value in values.items() if value})}#event-list"

    def choice(self) -> Choice:
        return Choice(destination=self.destination, error=self.error)


@dataclass(frozen=True, slots=True)
class Outbox:
    """What the page shows."""

    at: datetime
    relay: TickLife | None
    destinations: list[Destination]
    page: EventPage
    dead: Counted[DeadCount] | None  # of the list of dead events


async def show(request: Request) -> Response:
    visitor = await require_visitor(request, *READERS)
    chosen = _chosen(request, visitor)
    found = await call_ledger(lambda: _read(chosen))
    first_page = chosen.address() if chosen.before < LARGEST_ID else None
    values = {
        "page": "outbox",
        "found": found,
        "chosen": chosen,
        "lists": {kind: (title, chosen.address(kind=kind)) for kind, title in LISTS.items()},
        "newer": first_page,
        "older": chosen.address(before=found.page.older) if found.page.older else None,
        "ceiling": CEILING,
        "window": event_pages.WINDOW,
    }
    return render(request, "outbox.html", values)


async def show_event(request: Request) -> Response:
    await require_visitor(request, *READERS)
    id_ = _event_id(request)
    stored, at = await call_ledger(lambda: _read_event(id_))
    if stored is None:
        raise NotFound(f"There is no event {id_}: it never existed, or it was pruned.")
    values = {"page": "outbox", "id": id_, "stored": stored, "at": at, "most_tasks": MOST_TASKS}
    return render(request, "outbox/event.html", {**values, "is_dead": _is_dead(stored)})


async def change_dead(request: Request) -> Response:
    """Requeue or discard all dead events of a destination, or those with an error, as far as the time allows."""
    visitor, form = await require_form(request, Scope.OPERATE)
    chosen = Chosen(Kind.DEAD, _text(form, "destination") or None, _text(form, "error") or None)
    if chosen.destination is None or _text(form, "confirmation") != chosen.destination:
        text = f"Nothing was changed: type {chosen.destination or 'the name of the destination'} to confirm."
        return go_to(request, chosen.address(), say=text, is_refusal=True)
    return await changed(request, lambda: _change(chosen.choice(), visitor, form), back=chosen.address())


async def change_event(request: Request) -> Response:
    """Requeue or discard one dead event."""
    visitor, form = await require_form(request, Scope.OPERATE)
    id_ = _event_id(request)
    return await changed(request, lambda: _change_one(id_, visitor, form), back=f"{HOME}/{id_}")


def _chosen(request: Request, visitor: Visitor) -> Chosen:
    given = request.query_params
    kind = Kind(given["status"].lower()) if given.get("status", "").lower() in list(Kind) else Kind.WAITING
    error = storable(given.get("error", "")) if visitor.can_operate and kind is Kind.DEAD else ""
    before = given.get("before", "")
    return Chosen(
        kind,
        storable(given.get("destination", "")) or None,
        error or None,
        _number(before) or LARGEST_ID,
    )


def _read(chosen: Chosen) -> Outbox:
    addresses = settings.current().outbox_destinations
    with engine().connect() as connection:
        at = now(connection)
        states = read_destination_states(connection, addresses)
        conditions = destination_conditions.describe(
            states, addresses, pace=read_pace(connection), pauses=list(read_pauses(connection)), at=at
        )
        relay = next((each for each in read_ticks(connection) if each.name == "relay"), None)
        page = read_page(
            connection, chosen.kind, destination=chosen.destination, error=chosen.error, before=chosen.before
        )
        is_dead = chosen.kind is Kind.DEAD and page.events
        dead = dead_events.count(connection, chosen.choice(), limit=CEILING) if is_dead else None
        return Outbox(at, relay, conditions, page, dead)


def _read_event(id_: int) -> tuple[StoredEvent | None, datetime]:
    with engine().connect() as connection:
        return read_event(connection, id_), now(connection)


def _is_dead(stored: StoredEvent) -> bool:
    return stored.event is not None and stored.event.status == EventStatus.DEAD


def _change(choice: Choice, visitor: Visitor, form: FormData) -> str:
    """Change batch after batch until all are changed or the time is over; return what was done."""
    act, until, done = _act(form), time.monotonic() + CHANGE_SECONDS, 0
    for batch in act.change(engine(), choice, actor=visitor.actor, reason=_reason(form)):
        done += len(batch)
        if time.monotonic() > until:
            break
    with engine().connect() as connection:
        left = dead_events.count(connection, choice, limit=CEILING).total
    rest = f" {_events(left)} {'is' if left == 1 else 'are'} left: repeat it." if left else ""
    return f"{_events(done)} for {choice.destination} {'was' if done == 1 else 'were'} {act.done}.{rest}"


def _change_one(id_: int, visitor: Visitor, form: FormData) -> str:
    act = _act(form)
    if not any(act.change(engine(), Choice(ids=[id_]), actor=visitor.actor, reason=_reason(form))):
        raise Misuse(f"The event {id_} was not changed: it is not dead any more, or another process holds it.")
    return f"The event {id_} was {act.done}."


def _act(form: FormData) -> Act:
    try:
        return ACTS[_text(form, "action")]
    except KeyError:
        raise Misuse("The form does not say whether to requeue or to discard.") from None


def _reason(form: FormData) -> str | None:
    return _text(form, "reason")[:LONGEST_REASON] or None


def _text(form: FormData, name: str) -> str:
    given = form.get(name)
    return storable(given).strip() if isinstance(given, str) else ""


def _event_id(request: Request) -> int:
    given = request.path_params["id"]
    id_ = _number(given)
    if id_ is None:
        raise NotFound("There is no such event: its id is a number.")
    return id_


def _number(given: str) -> int | None:
    """Return a positive number that fits into an id, or None."""
    is_number = given.isascii() and given.isdigit() and len(given) < 20
    return int(given) if is_number and 0 < int(given) <= LARGEST_ID else None


def _events(count: int) -> str:
    return f"{count:,}{'+' if count >= CEILING else ''} event{'' if count == 1 else 's'}"


ROUTES: Final = [
    Route(HOME, show),
    Route(f"{HOME}/dead", change_dead, methods=["POST"]),
    Route(f"{HOME}/{{id}}", show_event),
    Route(f"{HOME}/{{id}}", change_event, methods=["POST"]),
]
