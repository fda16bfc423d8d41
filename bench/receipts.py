"""Measure receipts over HTTP and WebSocket: how fast `accepted` and `saved` are answered, and how saving keeps up.

    conditions    latency and rate of both receipts: PostgreSQL idle, busy (pgbench), and with every commit 20 ms slower
    sustained     the save lag, savedAt − acceptedAt, at half of the highest rate of `accepted` (`receipt_outage.py`)
    outage        PostgreSQL is stopped under load; how fast the backlog drains, and whether anything is lost or doubled
    chat          many WebSocket clients on one API process (`receipt_chat.py`)

Everything shares the cores of one machine: this client, one API process, the worker that saves, PostgreSQL, two Redis
servers, and pgbench or the proxy that delays commits. So the highest rate is what all of them can do together, and
latencies are measured at a low fixed rate, which is the same for both receipts. The receipts take turns, because the
speed of a shared machine changes; percentiles are those of a turn, and the median of the turns counts.

`saved` is the synchronous way: the answer is sent when the task is committed in PostgreSQL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from api.tokens import Scope
from bench.ingest import Goal
from bench.measure_system import Say
from bench.peers.programs import MeasurementFailed
from bench.receipt_chat import Chat
from bench.receipt_chat import measure as measure_chat
from bench.receipt_load import ACCEPTED, SAVED, Load, Target, Waits, as_fast_as_possible, at_rate
from bench.receipt_outage import Outage, Sustained, measure_outage, measure_sustained
from bench.receipt_stack import Stack, running_servers

SLOW_COMMIT_MS: Final = 20.0
TURNS: Final = 5  # of each receipt, at the fixed rate
WARM_UP_SECONDS: Final = 1.0
IDLE: Final = "idle"
BUSY: Final = "busy"
SLOW_COMMITS: Final = "slow_commits"


@dataclass(frozen=True, slots=True)
class Speed:
    """Latencies at the fixed rate, and the highest rate, with as many requests at once as there are connections."""

    p50_ms: float
    p99_ms: float
    per_second: float

    @classmethod
    def of(cls, turns: Sequence[Waits], per_second: float) -> Speed:
        """Return the medians of the turns, so that one disturbance from outside does not decide."""
        return cls(median(each.p50_ms for each in turns), median(each.p99_ms for each in turns), per_second)


@dataclass(frozen=True, slots=True)
class Condition:
    """Both receipts under one condition, and ratios of accepted to saved, which are medians of the turns, too."""

    name: str
    accepted: Speed
    saved: Speed
    p50_ratio: float
    p99_ratio: float
    rate_ratio: float

    @classmethod
    def of(cls, name: str, turns: Mapping[str, Sequence[Waits]], rates: Mapping[str, float]) -> Condition:
        both = list(zip(turns[ACCEPTED], turns[SAVED], strict=True))
        return cls(
            name,
            Speed.of(turns[ACCEPTED], rates[ACCEPTED]),
            Speed.of(turns[SAVED], rates[SAVED]),
            median(accepted.p50_ms / saved.p50_ms for accepted, saved in both),
            median(accepted.p99_ms / saved.p99_ms for accepted, saved in both),
            rates[ACCEPTED] / rates[SAVED],
        )


@dataclass(frozen=True, slots=True)
class Found:
    """All results of one run."""

    rate: float  # requests per second at which latencies were measured
    conditions: list[Condition]
    sustained: Sustained
    outage: Outage
    chats: list[Chat]


def goals(found: Found) -> list[Goal]:
    """Return the design goals and the figures reached."""
    slow = next(each for each in found.conditions if each.name == SLOW_COMMITS)
    reached = [
        Goal("accepted p99 : saved p99, commits 20 ms slower", slow.p99_ratio, 0.25, at_most=True),
        Goal("save lag at half the highest rate, p99 s", found.sustained.lag_p99_seconds, 1, at_most=True),
        Goal("drain after an outage : bare INSERTs", found.outage.drain_ratio, 0.6),
        Goal("receipts lost in an outage", found.outage.lost, 0, at_most=True),
        Goal("tasks doubled in an outage", found.outage.doubled, 0, at_most=True),
    ]
    for chat in found.chats:
        reached.append(Goal(f"chat, {chat.mode}: errors", chat.errors, 0, at_most=True))
        reached.append(Goal(f"chat, {chat.mode}: lost receipts and messages", chat.lost, 0, at_most=True))
        by_from = chat.reorders["reorderByFrom"]
        reached.append(Goal(f"chat, {chat.mode}: reorderByFrom", by_from, 0, at_most=True))
    return reached


def measure(
    *,
    seconds: float,
    rate: float,
    sustained_seconds: float,
    outage_seconds: float,
    backlog: int,
    clients: int,
    messages: int,
    say: Say,
) -> Found:
    """Measure everything once. `backlog` is the fewest messages to drain. Without `clients` the chat is left out."""
    with running_servers() as stack:
        target = Target(stack.create_token("bench", Scope.TASKS_SUBMIT))
        with stack.programs():
            target.port = stack.port
            say(f"PostgreSQL idle: {rate:,.0f} requests/s, then as many as possible …")
            idle = _compare(stack, target, IDLE, rate, seconds)
            say("PostgreSQL busy: the same …")
            with stack.busy_postgres():
                busy = _compare(stack, target, BUSY, rate, seconds)
            half = idle.accepted.per_second / 2
            say(f"{sustained_seconds:g} s at {half:,.0f} requests/s …")
            sustained = measure_sustained(stack, target, half, sustained_seconds)
            say(f"PostgreSQL stopped for {outage_seconds:g} s at {half:,.0f} requests/s …")
            outage = measure_outage(stack, target, half, outage_seconds, backlog)
        with stack.slow_commits(SLOW_COMMIT_MS) as variables, stack.programs(variables):
            target.port = stack.port
            say(f"commits {SLOW_COMMIT_MS:g} ms slower: {rate:,.0f} requests/s, then as many as possible …")
            slow = _compare(stack, target, SLOW_COMMITS, rate, seconds)
    chats = list(measure_chat(clients, messages, say)) if clients else []
    return Found(rate, [idle, busy, slow], sustained, outage, chats)


def _compare(stack: Stack, target: Target, name: str, rate: float, seconds: float) -> Condition:
    _warm_up(target, rate)
    stack.await_saved()
    turns: dict[str, list[Waits]] = {ACCEPTED: [], SAVED: []}
    for _ in range(TURNS):
        for level, found in turns.items():
            found.append(_complete(at_rate(target, level, rate, seconds / TURNS)).waits())
            stack.await_saved()
    rates = {}
    for level in turns:
        rates[level] = _complete(as_fast_as_possible(target, level, seconds)).per_second
        stack.await_saved()
    condition = Condition.of(name, turns, rates)
    if name == SLOW_COMMITS and condition.saved.p50_ms < SLOW_COMMIT_MS:
        raise MeasurementFailed(f"Commits were not delayed: `saved` took {condition.saved.p50_ms:.1f} ms.")
    return condition


def _warm_up(target: Target, rate: float) -> None:
    """Open the connections of the API, and let both ways run once."""
    for level in (ACCEPTED, SAVED):
        _complete(at_rate(target, level, rate, WARM_UP_SECONDS))


def _complete(load: Load) -> Load:
    load.require_all()
    return load
