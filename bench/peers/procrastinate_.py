"""Procrastinate with its own worker and LISTEN/NOTIFY; jobs are kept. `width` is the concurrency of the worker."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

import procrastinate  # type: ignore[import-not-found]
import psycopg_pool  # type: ignore[import-not-found]

from bench.peers.effect import INSERT, VALUE, database_url, pass_gate, run_command

CHUNK = 1000
app = procrastinate.App(
    connector=procrastinate.PsycopgConnector(conninfo=database_url(), min_size=4, max_size=20),
    import_paths=["bench.peers.procrastinate_"],
)


@app.task(name="bench.insert")  # type: ignore[untyped-decorator]
async def insert(n: int) -> None:
    async with _pool().connection() as connection:
        pass_gate()
        await connection.execute(INSERT, (n, VALUE))


@cache
def _pool() -> Any:
    """Return a pool for the work, separate from the connections of the worker."""
    return psycopg_pool.AsyncConnectionPool(
        database_url(), min_size=1, max_size=20, kwargs={"autocommit": True}, open=False
    )


def submit(count: int) -> None:
    async def defer() -> None:
        async with app.open_async():
            await app.schema_manager.apply_schema_async()
            for first in range(0, count, CHUNK):
                last = min(first + CHUNK, count)
                await insert.batch_defer_async(*({"n": n} for n in range(first, last)))

    asyncio.run(defer())


def work(width: int, _place: int) -> None:
    async def run() -> None:
        async with app.open_async(), _pool():
            await app.run_worker_async(concurrency=width)

    asyncio.run(run())


if __name__ == "__main__":
    run_command(submit=submit, work=work)
