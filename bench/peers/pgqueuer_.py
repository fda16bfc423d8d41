"""PgQueuer with asyncpg, all its tables logged (its default). Its width is the batch size: 10 unless told otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg  # type: ignore[import-not-found]
import uvloop  # type: ignore[import-not-found]
from pgqueuer import PgQueuer  # type: ignore[import-not-found]
from pgqueuer.db import AsyncpgDriver  # type: ignore[import-not-found]
from pgqueuer.queries import Queries  # type: ignore[import-not-found]

from bench.peers.effect import VALUE, database_url, obey, pass_gate

CHUNK = 1000
INSERT = "INSERT INTO bench_sink (n, value) VALUES ($1, $2)"


@asynccontextmanager
async def worker() -> AsyncIterator[Any]:
    connection = await asyncpg.connect(database_url())
    pool = await asyncpg.create_pool(database_url(), min_size=1, max_size=10)
    queue = PgQueuer.from_asyncpg_connection(connection)

    @queue.entrypoint("insert")  # type: ignore[untyped-decorator]
    async def insert(job: Any) -> None:
        async with pool.acquire() as effects:
            pass_gate()
            await effects.execute(INSERT, int(job.payload), VALUE)

    try:
        yield queue
    finally:
        await pool.close()
        await connection.close()


def submit(count: int) -> None:
    async def enqueue() -> None:
        connection = await asyncpg.connect(database_url())
        queries = Queries(AsyncpgDriver(connection))
        await queries.install()
        for first in range(0, count, CHUNK):
            payloads = [str(n).encode() for n in range(first, min(first + CHUNK, count))]
            await queries.enqueue(["insert"] * len(payloads), payloads, [0] * len(payloads))
        await connection.close()

    asyncio.run(enqueue())


def work(width: int, _place: int) -> None:
    """As `pgq run` does, on uvloop. (The command itself stumbles over its own --log-level in 1.6.0.)"""

    async def run() -> None:
        async with worker() as queue:
            await queue.run(batch_size=width)

    uvloop.run(run())


if __name__ == "__main__":
    obey(submit=submit, work=work)
