"""The steps that `requeue-dead` and `discard-dead` share, for tasks and for outbox events.

Count what the filters choose, by kind → ask, unless there is a filter or --all → act in batches, at the given rate,
until done or Ctrl-C → report. commands/dead_tasks.py and commands/outbox.py declare the options and call `run`.
"""

# ruff: noqa: PLC0415 - SQLAlchemy loads slowly

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from commands import rate as rates
from commands.complaint import complain
from commands.confirmation import confirm, operator
from commands.interrupts import INTERRUPTED, until_interrupted
from commands.output import camel, console, on_stderr, plural, print_json, print_table, with_progress
from commands.wakeups import publish_wakeups

if TYPE_CHECKING:
    from rich.console import Console

    from outbox.dead_rows import Counted, Filters
    from tasks.operations.sink_effects import EffectCount
    from tasks.operations.wait_final import Statuses

GROUPS_SHOWN: Final = 20
PAST: Final = {"requeue": "requeued", "discard": "discarded"}

Limit = Annotated[int | None, typer.Option(min=1, help="Act on at most this many, the oldest first.")]
Rate = Annotated[
    float | None, typer.Option(parser=rates.parse_rate, metavar="RATE", help=f"Act no faster than {rates.HELP}.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only count what would be changed, by kind and error.")]


@dataclass(frozen=True, slots=True)
class Target:
    """The dead tasks or events to change, and the functions that count and change them."""

    noun: str  # task
    command: str  # outbox requeue-dead
    choice: Filters
    count: Callable[..., Counted[Any]]
    act: Callable[..., Iterator[Sequence[Any]]]
    effects: Callable[[], Sequence[EffectCount]] = tuple  # what the chosen ones have done in sinks

    @property
    def verb(self) -> str:
        return self.command.split()[-1].removesuffix("-dead")


@dataclass(frozen=True, slots=True)
class Options:
    limit: int | None
    rate: float | None
    reason: str | None
    everything: bool
    dry_run: bool
    as_json: bool


@dataclass(frozen=True, slots=True)
class Canary:
    """Act on a few tasks first, and on the others only if these succeed in time."""

    count: int
    seconds: float


def run(
    target: Target, options: Options, *, canary: Canary | None = None, finish: Callable[[], dict[str, Any]] = dict
) -> None:
    """Count, ask, act and report. `finish` runs after the last batch and returns further fields for the JSON."""
    from models.engine import engine
    from outbox.dead_rows import batch_size
    from tasks.operations.wait_final import all_succeeded, in_words

    total = _confirmed_total(target, options)
    if not total:
        return
    act = partial(target.act, engine(), target.choice, actor=operator(), reason=options.reason)
    done, outcome = 0, None
    with until_interrupted() as stopped, publish_wakeups():
        if canary is not None:
            first = [id_ for batch in act(limit=min(canary.count, total)) for id_ in batch]
            done, outcome = len(first), _wait_for_canaries(first, seconds=canary.seconds, stopped=stopped)
        if outcome is None or all_succeeded(outcome):
            batches = act(limit=total - done, batch=batch_size(options.rate))
            done += _act_in_batches(target, batches, total - done, options.rate, stopped)
        result = {"done": done, "total": total, **finish()}
    if outcome is not None:
        result["canary"] = {status or "gone": number for status, number in outcome.items()}
    if options.as_json:
        print_json(result)
    else:
        console.print(f"{PAST[target.verb]}: {done:,} of {total:,}")
    unchanged = plural(total - done, target.noun)
    if stopped.is_set():
        complain(f"Interrupted: {unchanged} left unchanged. It is safe to run the command again.")
        raise typer.Exit(INTERRUPTED)
    if outcome is not None and not all_succeeded(outcome):
        statuses = in_words(outcome) or "another operator changed them"
        complain(f"Not all canaries succeeded ({statuses}): {unchanged} left unchanged.")
        raise typer.Exit(1)
    if done < total:
        complain(f"{unchanged} changed by another operator meanwhile.")


def _confirmed_total(target: Target, options: Options) -> int:
    """Return how many to change: 0 after a dry run or if nothing is chosen. Exit if the operator does not agree.

    With --json, stdout gets the result only: the table and the question go to stderr.
    """
    from models.engine import engine

    with engine().connect() as connection:
        found = target.count(connection, target.choice, limit=options.limit)
    is_over = options.dry_run or not found.total
    must_ask = not is_over and target.choice.is_all and not options.everything
    if must_ask or not options.as_json:
        on = on_stderr if options.as_json else console
        _print_groups(found, target.noun, on=on)
        _print_effects(target.effects(), on=on)
    elif options.dry_run:
        groups, effects = list(map(camel, found.groups)), list(map(camel, target.effects()))
        print_json({"total": found.total, "dryRun": True, "groups": groups} | ({"effects": effects} if effects else {}))
    elif is_over:
        print_json({"done": 0, "total": 0})
    if must_ask:
        remedy = f"give a filter. To act on all: manage.py {target.command} --all"
        question = f"{target.verb.capitalize()} {plural(found.total, target.noun)}?"
        confirm(question, remedy=remedy, as_json=options.as_json)
    return 0 if is_over else found.total


def _print_groups(found: Counted[Any], noun: str, *, on: Console) -> None:
    if not found.total:
        on.print(f"No dead {noun} matches.")
        return
    shown = found.groups[:GROUPS_SHOWN]
    names = [field.name for field in dataclasses.fields(shown[0]) if field.name != "count"]
    print_table(
        (*(name.replace("_", " ") for name in names), f"{noun}s"),
        [(*(str(getattr(each, name) or "")[:120] for name in names), f"{each.count:,}") for each in shown],
        on=on,
    )
    others = found.total - sum(each.count for each in shown)
    on.print(f"chosen: {found.total:,}" + (f" ({others:,} with other errors)" if others else ""))


def _print_effects(effects: Sequence[EffectCount], *, on: Console) -> None:
    if not effects:
        return
    on.print()
    print_table(
        ("effects in the sink", "committed", "not committed", "unknown"),
        [(each.sink, f"{each.committed:,}", f"{each.not_committed:,}", f"{each.unknown:,}") for each in effects],
        on=on,
    )


def _wait_for_canaries(ids: list[uuid.UUID], *, seconds: float, stopped: Event) -> Statuses:
    from models.engine import engine
    from tasks.operations.wait_final import Statuses, in_words, watch

    statuses: Statuses = Statuses()
    with on_stderr.status("canaries …") as shown:
        for statuses in watch(engine(), ids, seconds=seconds, stopped=stopped):
            shown.update(f"canaries: {in_words(statuses)}")
    return statuses


def _act_in_batches(
    target: Target, batches: Iterator[Sequence[Any]], total: int, per_second: float | None, stopped: Event
) -> int:
    """Return how many were changed. If a batch fails, print how far it got before raising the error."""
    what, done = PAST[target.verb], 0

    def count() -> Iterator[int]:
        nonlocal done
        for so_far in rates.paced(batches, total=total, per_second=per_second, stopped=stopped):
            done = so_far
            yield done

    try:
        return with_progress(count(), total=total, what=what)
    except Exception:
        complain(f"Stopped: {what} {done:,} of {total:,}. It is safe to run the command again.")
        raise
