"""Submit tasks over HTTP and measure the answers: at a fixed rate for latencies, or as fast as possible for the rate.

The client writes HTTP/1.1 by hand on connections that stay open, and parses answers only after the measurement. It
still shares the cores with everything that it measures (`receipts.py`).

At a fixed rate, a latency counts from the moment at which the request was due, so a server that stalls is charged for
all requests that had to wait. As fast as possible means that each connection sends the next request when it has the
answer to the last one.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

from bench.peers.programs import MeasurementFailed

ACCEPTED: Final = "accepted"
SAVED: Final = "saved"
CREATED: Final = 202
CONNECTIONS: Final = 32
TEXT: Final = "x" * 100
HEAD_END: Final = b"\r\n\r\n"
LONGEST_SECONDS: Final = 30.0  # for one answer


@dataclass(slots=True)
class Target:
    """The API that runs now, and a token for it. `numbers` gives each task a payload of its own."""

    token: str
    port: int = 0
    numbers: Iterator[int] = field(default_factory=count)

    def request(self, level: str, number: int) -> bytes:
        body = json.dumps({"type": "bench.task", "payload": {"n": number, "text": TEXT}}).encode()
        lines = (
            f"POST /api/tasks?receipt={level} HTTP/1.1",
            "Host: 127.0.0.1",
            f"Authorization: Bearer {self.token}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        )
        return "\r\n".join(lines).encode() + HEAD_END + body


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request; status 0 if the connection was lost."""

    number: int
    status: int
    body: bytes
    ms: float

    def receipt(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found


@dataclass(frozen=True, slots=True)
class Load:
    """The answers of one run, and the seconds that it took."""

    answers: Sequence[Answer]
    seconds: float

    @property
    def per_second(self) -> float:
        return len(self.answers) / self.seconds

    def waits(self) -> Waits:
        return Waits.of(answer.ms for answer in self.answers)

    def require_all(self) -> None:
        """Raise MeasurementFailed if a request was not answered with a new receipt."""
        if wrong := [answer for answer in self.answers if answer.status != CREATED]:
            shown = wrong[0].body.decode(errors="replace")[:300]
            raise MeasurementFailed(f"{len(wrong):,} requests failed, such as {wrong[0].status}: {shown}")


def at_rate(
    target: Target, level: str, rate: float, seconds: float, *, is_over: Callable[[], bool] = lambda: False
) -> Load:
    """Send requests at a fixed rate, for some time or until `is_over`."""

    async def run() -> Load:
        answers: list[Answer] = []
        free: asyncio.Queue[_Connection] = asyncio.Queue()

        async def send(due: float) -> None:
            connection = await free.get()
            answers.append(await connection.send(target, level, due))
            free.put_nowait(connection)

        async with _connections(target) as connections:
            for each in connections:
                free.put_nowait(each)
            began_at = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                async for due in _due_times(began_at, rate, seconds):
                    if is_over():
                        break
                    group.create_task(send(due))
            return Load(answers, time.perf_counter() - began_at)

    return asyncio.run(run())


def as_fast_as_possible(target: Target, level: str, seconds: float) -> Load:
    """Send requests on all connections, each when the last one was answered."""

    async def run() -> Load:
        answers: list[Answer] = []
        began_at = time.perf_counter()

        async def client(connection: _Connection) -> None:
            while (due := time.perf_counter()) < began_at + seconds:
                answers.append(await connection.send(target, level, due))

        async with _connections(target) as connections:
            began_at = time.perf_counter()
            await asyncio.gather(*map(client, connections))
            return Load(answers, time.perf_counter() - began_at)

    return asyncio.run(run())


@dataclass(frozen=True, slots=True)
class Waits:
    """Percentiles of waiting times."""

    p50_ms: float
    p99_ms: float

    @classmethod
    def of(cls, milliseconds: Iterable[float]) -> Waits:
        found = list(milliseconds)
        return cls(percentile(found, 0.5), percentile(found, 0.99))


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


async def _due_times(began_at: float, rate: float, seconds: float) -> AsyncIterator[float]:
    """Yield when each request is due, at that time or, if the machine is slow, later."""
    for number in range(max(1, round(rate * seconds))):
        due = began_at + number / rate
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        yield due


@asynccontextmanager
async def _connections(target: Target) -> AsyncIterator[list[_Connection]]:
    made = [_Connection(target.port) for _ in range(CONNECTIONS)]
    for each in made:
        await each.open()
    try:
        yield made
    finally:
        for each in made:
            each.close()


class _Connection(asyncio.Protocol):
    """One connection that stays open, with one request at a time."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._transport: asyncio.Transport | None = None
        self._received = b""
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None

    async def open(self) -> None:
        await asyncio.get_running_loop().create_connection(lambda: self, "127.0.0.1", self.port)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def send(self, target: Target, level: str, due: float) -> Answer:
        """Send a request that was due at a time of `time.perf_counter`, and wait for the answer."""
        number = next(target.numbers)
        try:
            if self._transport is None:
                await self.open()
            assert self._transport is not None
            self._answer = asyncio.get_running_loop().create_future()
            self._transport.write(target.request(level, number))
            async with asyncio.timeout(LONGEST_SECONDS):
                status, body = await self._answer
        except OSError as error:  # TimeoutError and ConnectionError included
            self.close()
            self._transport = None
            status, body = 0, str(error).encode()
        return Answer(number, status, body, (time.perf_counter() - due) * 1000)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._received = transport, b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(HEAD_END)
        if not found or len(body) < _length(head):
            return
        self._received = b""
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((int(head[9:12]), body))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionError("the server closed the connection"))


def _length(head: bytes) -> int:
    """Return the Content-Length of an answer; the API sends one with every answer that is used here."""
    lowered = head.lower()
    start = lowered.index(b"content-length:") + len(b"content-length:")
    return int(lowered[start:].split(b"\r\n", 1)[0])
