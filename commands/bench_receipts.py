"""bench receipts: measure `accepted` beside `saved`, an outage of PostgreSQL, and the chat."""

# ruff: noqa: PLC0415 - the benchmarks load every package

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from commands.bench_goals import print_goals
from commands.bench_progress import running_bench
from commands.options import Json
from commands.output import console, print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.receipt_chat import Chat
    from bench.receipt_outage import Outage, Sustained
    from bench.receipts import Condition


def receipts(
    *,
    seconds: Annotated[
        float,
        typer.Option(min=1, max=600, help="Seconds for each figure: latency and rate of each receipt, three times."),
    ] = 10,
    rate: Annotated[float, typer.Option(min=10, max=1000, help="Requests per second for latencies.")] = 100,
    sustained_seconds: Annotated[
        float, typer.Option(min=1, max=3600, help="Seconds of steady load for the save lag.")
    ] = 60,
    outage_seconds: Annotated[float, typer.Option(min=1, max=300, help="Seconds without PostgreSQL.")] = 30,
    backlog: Annotated[
        int,
        typer.Option(
            min=0,
            max=100_000,
            help="Fewest messages that must wait at the end of the outage. What the load did not send is accepted"
            " without HTTP.",
        ),
    ] = 20_000,
    clients: Annotated[int, typer.Option(min=0, max=2000, help="Number of chat clients; 0: no chat.")] = 500,
    messages: Annotated[int, typer.Option(min=1, max=1000, help="Number of messages of each chat client.")] = 6,
    as_json: Json = False,
) -> None:
    """Measure receipts over HTTP and WebSocket: latency, rate, save lag, an outage of PostgreSQL, and a chat.

    A real API process and a real worker run on temporary servers. `accepted` is compared with `saved`, the synchronous
    way: while PostgreSQL is idle, busy, and slow to commit.

    Example: `manage.py bench receipts --seconds 5 --sustained-seconds 20 --outage-seconds 10 --clients 100`
    """
    from bench import receipts as measured

    if clients == 1:
        raise typer.BadParameter("A client needs another one to send to.", param_hint="--clients")
    with running_bench() as show:
        found = measured.measure(
            seconds=seconds,
            rate=rate,
            sustained_seconds=sustained_seconds,
            outage_seconds=outage_seconds,
            backlog=backlog,
            clients=clients,
            messages=messages,
            say=show,
        )
    goals = measured.goals(found)
    if as_json:
        print_json({"found": found, "goals": goals})
        return
    _print_conditions(found.conditions, rate)
    _print_saving(found.sustained, found.outage)
    if found.chats:
        _print_chats(found.chats)
    print_goals(goals)


def _print_conditions(conditions: Sequence[Condition], rate: float) -> None:
    names = {"idle": "PostgreSQL idle", "busy": "PostgreSQL busy", "slow_commits": "commits 20 ms slower"}
    rows = []
    for each in conditions:
        for receipt, speed in (("accepted", each.accepted), ("saved", each.saved)):
            figures = (f"{speed.p50_ms:.1f}", f"{speed.p99_ms:.1f}", f"{speed.per_second:,.0f}")
            rows.append((names[each.name], receipt, *figures))
        ratios = (f"{each.p50_ratio:.2f}×", f"{each.p99_ratio:.2f}×", f"{each.rate_ratio:.2f}×")
        rows.append(("", "accepted : saved", *ratios))
    print_table((f"at {rate:g} requests/s", "receipt", "p50 ms", "p99 ms", "highest rate/s"), rows)
    console.print()


def _print_saving(sustained: Sustained, outage: Outage) -> None:
    print_table(
        (f"{sustained.seconds:g} s at half the highest rate, {sustained.per_second:,.0f}/s", "p50", "p99"),
        [
            ("request → accepted, ms", f"{sustained.accepted.p50_ms:.1f}", f"{sustained.accepted.p99_ms:.1f}"),
            ("accepted → saved, s", f"{sustained.lag_p50_seconds:.3f}", f"{sustained.lag_p99_seconds:.3f}"),
        ],
    )
    console.print()
    print_table(
        (f"PostgreSQL stopped for {outage.seconds:g} s under the same load", ""),
        [
            ("receipts received", f"{outage.received:,}"),
            ("requests without a receipt", f"{outage.refused:,}"),
            ("request → accepted, p50 and p99 ms", f"{outage.accepted.p50_ms:.1f} and {outage.accepted.p99_ms:.1f}"),
            ("backlog", f"{outage.backlog:,}, of which {outage.added:,} accepted without HTTP"),
            ("first save", f"after {outage.first_save_seconds:.1f} s"),
            ("drain", f"{outage.drain_per_second:,.0f}/s"),
            ("bare INSERTs", f"{outage.bare_per_second:,.0f}/s, the drain is {outage.drain_ratio:.0%}"),
            (
                "the same code without Redis",
                f"{outage.without_redis_per_second:,.0f}/s, the drain is {outage.without_redis_ratio:.0%}",
            ),
            ("receipts lost", f"{outage.lost:,}"),
            ("tasks doubled", f"{outage.doubled:,}"),
        ],
    )
    console.print()


def _print_chats(chats: Sequence[Chat]) -> None:
    rows = [
        ("messages", [f"{chat.messages:,}" for chat in chats]),
        ("errors", [str(chat.errors) for chat in chats]),
        ("receipts and messages lost", [str(chat.lost) for chat in chats]),
        ("receipts and messages repeated", [str(chat.repeated) for chat in chats]),
    ]
    for what, name in (
        ("send → ACK accepted", "accepted"),
        ("send → ACK saved", "saved"),
        ("send → arrival at the receiver", "arrived"),
    ):
        waits = [getattr(chat, name) for chat in chats]
        rows.append((f"{what}, p50 and p99 ms", [f"{each.p50_ms:.1f} and {each.p99_ms:.1f}" for each in waits]))
    rows += [(name, [str(chat.reorders[name]) for chat in chats]) for name in chats[0].reorders]
    columns = (f"chat of {chats[0].clients:,} clients", *(chat.mode for chat in chats))
    print_table(columns, [(what, *cells) for what, cells in rows])
    console.print()
