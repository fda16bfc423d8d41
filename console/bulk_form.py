"""The form that starts a bulk action: a preview of what it would change, its options, and a typed confirmation.

The form has the time of its preview, so that the action leaves alone what has changed since then, and the id of the new
action, so that a form that is sent twice starts one action. A form that is refused is shown again with a new preview
and with all that was typed.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final
from urllib.parse import urlencode

from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.responses import Response

from api.bulk_threads import look_for_bulk_actions
from api.ledger_calls import call_ledger
from api.tokens import Scope
from console.answers import go_to
from console.bulk_words import WORDS
from console.door import PREFIX
from console.pages import render
from console.task_search import filter_of, parse, understand
from console.visitors import require_form, require_visitor
from models.bulk_actions import BulkVerb
from models.clock import now
from models.engine import engine
from models.errors import CeleriacError, Misuse, Unreachable
from tasks.operations import bulk_actions
from tasks.operations.bulk_actions import (
    LONGEST_CANARY_SECONDS,
    LONGEST_REASON,
    MOST_CANARIES,
    WITH_CANARY,
    Order,
    Preview,
)
from tasks.operations.bulk_statements import COUNT_CEILING
from tasks.operations.listing import TaskFilter

HOME: Final = f"{PREFIX}/bulk"
ACTS: Final = Scope.OPERATE
CANARY_SECONDS: Final = "60"


@dataclass(frozen=True, slots=True)
class Typed:
    """What the form was given."""

    verb: BulkVerb
    q: str
    reason: str = ""
    per_second: str = ""
    canary: str = ""
    canary_seconds: str = CANARY_SECONDS
    reset_steps: bool = False
    accept_duplicates: bool = False
    confirmation: str = ""


@dataclass(frozen=True, slots=True)
class Offer:
    """What the action would change, and at which time."""

    query: str
    as_of: datetime
    preview: Preview
    id: uuid.UUID

    @property
    def changing(self) -> int:
        return self.preview.total - self.preview.left_out

    @property
    def is_nothing(self) -> bool:
        return self.preview.total == 0 and self.preview.is_exact


async def show_new(request: Request) -> Response:
    """Show the preview and the form."""
    await require_visitor(request, ACTS)
    given = request.query_params
    return await _form(request, Typed(_verb(given.get("action") or BulkVerb.REQUEUE), given.get("q", "")))


async def create(request: Request) -> Response:
    """Start the action and go to its page. If that is refused, show the form again."""
    visitor, form = await require_form(request, ACTS)
    typed = _typed(form)

    def start() -> uuid.UUID:
        with engine().begin() as connection:
            as_of = min(_time(form), now(connection))
            query = understand(connection, parse(typed.q))
            order = _order(form, typed, str(query), filter_of(connection, query, at=as_of), as_of)
            found = bulk_actions.preview(connection, order.verb, order.chosen, as_of=as_of)
            _require_change(order, found)
            _require_confirmation(form, typed)
            bulk_actions.create(connection, order, actor=visitor.actor)
            return order.id

    try:
        id_ = await call_ledger(start)
    except Unreachable:
        raise
    except CeleriacError as refused:
        return await _form(request, typed, refusal=refused.message)
    look_for_bulk_actions()
    return go_to(request, f"{HOME}/{id_}")


async def _form(request: Request, typed: Typed, *, refusal: str = "") -> Response:
    offer: Offer | None = None
    try:
        offer = await call_ledger(lambda: _offer(typed))
        typed = replace(typed, q=offer.query)
    except Misuse as unreadable:
        refusal = refusal or unreadable.message
    values = {
        "page": "tasks",
        "typed": typed,
        "offer": offer,
        "refusal": refusal,
        "words": WORDS[typed.verb],
        "actions": {each: (WORDS[each].title, address_of(each, typed.q)) for each in BulkVerb},
        "has_canary": typed.verb in WITH_CANARY,
        "tasks": f"{PREFIX}/tasks?{urlencode({'q': typed.q})}",
        "ceiling": COUNT_CEILING,
        "limits": {"reason": LONGEST_REASON, "canaries": MOST_CANARIES, "seconds": LONGEST_CANARY_SECONDS},
    }
    return render(request, "bulk/new.html", values, status=422 if refusal else 200)


def address_of(verb: BulkVerb, query: str) -> str:
    """Return the address of the form for this action on the tasks of a search."""
    return f"{HOME}/new?{urlencode({'action': verb, 'q': query})}"


def _offer(typed: Typed) -> Offer:
    with engine().connect() as connection:
        as_of = now(connection)
        query = understand(connection, parse(typed.q))
        chosen = filter_of(connection, query, at=as_of)
        found = bulk_actions.preview(connection, typed.verb, chosen, as_of=as_of)
    return Offer(str(query), as_of, found, uuid.uuid4())


def _order(form: FormData, typed: Typed, query: str, chosen: TaskFilter, as_of: datetime) -> Order:
    """Return what is to be done. Raises Misuse."""
    has_canary = bool(typed.canary)
    try:
        id_ = uuid.UUID(_text(form, "id"))
        per_second = float(typed.per_second) if typed.per_second else None
        canary = int(typed.canary) if has_canary else None
        seconds = int(typed.canary_seconds or CANARY_SECONDS) if has_canary else None
    except ValueError:
        raise Misuse("The rate, the number of canaries and their seconds must be numbers.") from None
    return Order(
        typed.verb,
        query,
        chosen,
        as_of,
        typed.reason,
        per_second=per_second,
        canary=canary,
        canary_seconds=seconds,
        reset_steps=typed.reset_steps,
        accept_duplicates=typed.accept_duplicates,
        id=id_,
    )


def _require_change(order: Order, found: Preview) -> None:
    """Raise Misuse if the action would change no task."""
    if found.total == 0 and found.is_exact:
        raise Misuse(f"No task would be {WORDS[order.verb].done}: those that matched have changed since the preview.")
    if found.total == found.left_out and found.is_exact and not order.accept_duplicates:
        raise Misuse(
            "No task would be requeued: their sinks have forgotten them. Accept that effects may happen twice."
        )


def _require_confirmation(form: FormData, typed: Typed) -> None:
    """Raise Misuse unless the number of tasks that the page has shown was typed, or the word of the action."""
    shown, given = _text(form, "total"), typed.confirmation.lower().replace(",", "")
    if given != typed.verb and not (shown and given == shown):
        number = f"{shown} or " if shown else ""
        raise Misuse(f"Nothing was changed: type {number}{typed.verb} to confirm.")


def _typed(form: FormData) -> Typed:
    return Typed(
        _verb(_text(form, "action")),
        _text(form, "q"),
        reason=_text(form, "reason"),
        per_second=_text(form, "per_second"),
        canary=_text(form, "canary"),
        canary_seconds=_text(form, "canary_seconds"),
        reset_steps="reset_steps" in form,
        accept_duplicates="accept_duplicates" in form,
        confirmation=_text(form, "confirmation"),
    )


def _time(form: FormData) -> datetime:
    """Return the time of the preview."""
    try:
        at = datetime.fromisoformat(_text(form, "as_of"))
    except ValueError:
        at = datetime.min
    if at.tzinfo is None:
        raise Misuse("The form does not say when its preview was made. Load the page again.")
    return at


def _verb(given: str) -> BulkVerb:
    if given not in list(BulkVerb):
        raise Misuse(f"There is no bulk action {given[:40]!r}. Known: {', '.join(BulkVerb)}.")
    return BulkVerb(given)


def _text(form: FormData, name: str) -> str:
    """Return a field without control characters, some of which the ledger cannot store."""
    given = form.get(name)
    return "".join(each for each in given if each.isprintable()).strip() if isinstance(given, str) else ""
