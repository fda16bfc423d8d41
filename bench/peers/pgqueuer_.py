"""PgQueuer with asyncpg and logged tables, its default. `width` is the batch size; its default is 10."""

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

from bench.peers.effect import VALUE, database_url, pass_gate, run_command

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
    """Run as `pgq run` does, on uvloop. The command itself fails in 1.6.0 because of its own --log-level."""

    async def run() -> None:
        async with worker() as queue:
            await queue.run(batch_size=width)

    uvloop.run(run())


if __name__ == "__main__":
    run_command(submit=submit, work=work)
