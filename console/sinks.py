"""Sinks: their guarantees, whether they answer, and the transactions in doubt with what becomes of each.

The one button starts a recovery, which obeys the ledger's decisions. Nothing here decides about a transaction. Readers
do not see what a sink has said: it may contain addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from api.ledger_calls import call_ledger
from api.tokens import Scope
from console.answers import changed
from console.door import PREFIX
from console.formats import duration
from console.pages import render
from console.slow_answers import PATIENCE_SECONDS, Questions, answers, sink_questions
from console.visitors import READERS, require_form, require_visitor
from models.driver_values import storable
from models.engine import engine
from models.errors import Misuse
from models.process_singleton import OnePerProcess
from models.sinks import Decision
from models.sinks import SinkState as TransactionState
from sinks.configuration import open_sinks
from sinks.contract import Guarantee, Sink
from sinks.in_doubt import CEILING, InDoubt, TransactionInDoubt, count_by_sink, read_oldest
from sinks.recovery import Recovered, recover
from tasks.operations.sink_list import SinkState, ask, describe

HOME: Final = f"{PREFIX}/sinks"
RECOVERY_SECONDS: Final = 2.5  # that a form waits for a recovery; less than the patience of `call_ledger`
MOST: Final = 100
SILENT: Final = (False, f"It did not answer within {PATIENCE_SECONDS:g} s.")
GUARANTEES: Final = {
    Guarantee.ATOMIC: "commits together with SUCCEEDED",
    Guarantee.KEYED: "a repetition finds the key of the effect",
    Guarantee.TWO_PHASE: "prepares, and obeys the ledger's decision",
    Guarantee.SCRIPT: "one Redis script, for consumers of streams",
    Guarantee.AT_LEAST_ONCE: "may happen twice",
}


@dataclass(frozen=True, slots=True)
class Sinks:
    """What the page shows."""

    states: list[SinkState]
    unknown: Mapping[str, InDoubt]  # sinks with transactions in doubt that SINKS does not name
    transactions: list[TransactionInDoubt]
    total: int  # number of transactions in doubt


async def show(request: Request) -> Response:
    await require_visitor(request, *READERS)
    found = await _read()
    values = {
        "page": "sinks",
        "found": found,
        "guarantees": GUARANTEES,
        "fates": [_fate(each) for each in found.transactions],
        "most": MOST,
        "ceiling": CEILING,
    }
    return render(request, "sinks.html", values)


async def start_recovery(request: Request) -> Response:
    """Run one recovery, of one sink or of all."""
    _, form = await require_form(request, Scope.OPERATE)
    return await changed(request, lambda: _recover(form), back=HOME)


async def _read() -> Sinks:
    """Read the ledger, then ask all sinks at once."""
    in_doubt, transactions, sinks = await call_ledger(_read_ledger)
    asked = [sink_questions().ask(("health", sink.name), partial(ask, sink)) for sink in sinks]
    found = await answers(asked)
    states = [
        describe(sink, in_doubt.get(sink.name), answer or SILENT) for sink, answer in zip(sinks, found, strict=True)
    ]
    known = {each.name for each in states}
    unknown = {name: each for name, each in in_doubt.items() if name not in known}
    return Sinks(states, unknown, transactions, sum(each.count for each in in_doubt.values()))


def _read_ledger() -> tuple[dict[str, InDoubt], list[TransactionInDoubt], list[Sink]]:
    with engine().connect() as connection:
        in_doubt, transactions = count_by_sink(connection), read_oldest(connection, most=MOST)
    return in_doubt, transactions, list(open_sinks().all())


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of a transaction in doubt. `shade` is a class of the stylesheet."""

    word: str
    sentence: str
    shade: str


def _fate(each: TransactionInDoubt) -> Fate:
    if each.state is TransactionState.FAILED:
        text = "The sink refused to obey, or gave an answer that is not understood. “Recover now” asks it once more."
        return Fate("failed", text, "dead")
    match each.decision:
        case Decision.COMMIT:
            text = "The effect counts. Recovery commits it; if it is gone from the sink, it was committed before."
            return Fate("commit", text, "succeeded")
        case Decision.ABORT:
            return Fate("abort", "Recovery aborts it, and the next attempt writes again.", "retrying")
    if each.is_running:
        return Fate("undecided", "Its attempt is running and decides when it is settled.", "running")
    return Fate("undecided", "Its attempt is over, so recovery decides to abort it.", "retrying")


def _recover(form: FormData) -> str:
    """Start a recovery unless one is running, wait a little, and return what it did."""
    given = form.get("sink")
    only = storable(given) if isinstance(given, str) and given else None
    if only is not None and only not in {sink.name for sink in open_sinks().all()}:
        raise Misuse(f"There is no sink {only[:100]!r} in SINKS of the API.")
    call = recoveries().ask("recovery", lambda: (only, recover(engine(), retries_failed=True, only=only)))
    where = f" of {only}" if only else ""
    try:
        done_for, found = call.result(RECOVERY_SECONDS)
    except TimeoutError:
        waited = duration(RECOVERY_SECONDS)
        return f"The recovery{where} takes longer than {waited} and goes on; this page shows what is left."
    if done_for != only:
        return "Another recovery was running; it is over now. Start this one again if it is still needed."
    return f"Recovery{where}: {_told(found)}"


def _told(found: Recovered) -> str:
    counts = {
        "committed": found.committed,
        "aborted": found.aborted,
        "left for later, because the sink does not answer or the attempt is running": found.left,
        "failed, so a person must look": found.failed,
        "prepared in a sink and unknown to this ledger, which are not touched": found.unknown,
    }
    told = [f"{len(gids):,} {words}" for words, gids in counts.items() if gids]
    return f"{'; '.join(told)}." if told else "nothing was left to do."


recoveries: Final = OnePerProcess(Questions)  # one recovery at a time; it has a thread of its own

ROUTES: Final = [Route(HOME, show), Route(f"{HOME}/recover", start_recovery, methods=["POST"])]
