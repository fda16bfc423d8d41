"""The receipt log as the API uses it: a Redis that is checked for durability, and errors that say what is wrong.

Each new connection is checked before its first use, and the server again every few seconds, because its configuration
can be changed while it runs. A command whose connection broke is repeated once on a new one: every command that is sent
here may be repeated. A server that is silent is not asked again for a second, so that requests do not queue up.

An outage is logged once when it begins (CRITICAL) and once when it ends. A server that is not durable still answers
what it has; that outage ends when a check finds it durable.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Final

import redis
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

import settings
from receipts import durability
from receipts.errors import NotDurable, ReceiptLogUnreachable, ReceiptsFull

logger = logging.getLogger(__name__)

ANSWER_SECONDS: Final = 2.0  # a disk may need as long for a sync; together with a look at the switches less than 5
SILENT_SECONDS: Final = 1.0  # how long a server is not asked that has just been silent
CHECK_SECONDS: Final = 5.0
MEMORY_SHARE: Final = 0.9  # of maxmemory; beyond it nothing is accepted
CONNECTIONS: Final = 64  # more requests than that wait for one
OUT_OF_MEMORY: Final = "command not allowed when used memory"  # the error of a script has it in the middle


class ReceiptLog:
    """The connections of one process. It belongs to the event loop in which it is used first."""

    def __init__(self) -> None:
        self.url = settings.current().redis_url
        self.place = settings.place(self.url)
        pool = BlockingConnectionPool.from_url(
            self.url,
            decode_responses=True,
            encoding_errors="surrogateescape",
            max_connections=CONNECTIONS,
            timeout=ANSWER_SECONDS,
            socket_connect_timeout=ANSWER_SECONDS,
            socket_timeout=ANSWER_SECONDS,
            redis_connect_func=self._connect,
            retry=Retry(NoBackoff(), 0),
        )
        self.client: Any = Redis(connection_pool=pool)
        self._scripts: dict[str, Any] = {}
        self.is_full = False  # nearly all memory is used up, so nothing new may be accepted
        self._checked_at = 0.0
        self._silent_at = 0.0
        self._outage: ReceiptLogUnreachable | None = None

    async def run(self, script: str, keys: Sequence[str], values: Sequence[Any]) -> Any:
        """Run a script of `lua.py`; raise ReceiptLogUnreachable, NotDurable or ReceiptsFull."""
        found = self._scripts.get(script)
        if found is None:
            found = self._scripts[script] = self.client.register_script(script)
        return await self._ask(lambda: found(keys=keys, args=values))

    async def call(self, command: str, *given: Any, **options: Any) -> Any:
        """Call a method of the client."""
        return await self._ask(lambda: getattr(self.client, command)(*given, **options))

    async def require_durable(self) -> None:
        """Raise NotDurable if the server may lose what it answers. It is asked every CHECK_SECONDS only."""
        now = time.monotonic()
        if now - self._checked_at <= CHECK_SECONDS:
            return
        self._checked_at = now  # one request checks; the others need not wait for it
        try:
            await self._ask(self._check)
        except BaseException:
            self._checked_at = 0.0
            raise
        self._end_outage()

    async def close(self) -> None:
        await self.client.aclose(close_connection_pool=True)

    async def _ask(self, ask: Any) -> Any:
        if time.monotonic() - self._silent_at < SILENT_SECONDS:
            raise self._unreachable("it did not answer a moment ago")
        try:
            try:
                answer = await ask()
            except redis.ConnectionError:
                answer = await ask()  # a connection of the pool may be older than the last restart of the server
        except NotDurable as error:
            self._begin_outage(error)
            raise
        except (redis.RedisError, OSError) as error:
            if OUT_OF_MEMORY in str(error):
                raise ReceiptsFull("The receipt log has no memory left; try again later.") from None
            if isinstance(error, redis.TimeoutError):
                self._silent_at = time.monotonic()
            unreachable = self._unreachable(str(error))
            self._begin_outage(unreachable)
            raise unreachable from None
        if not isinstance(self._outage, NotDurable):
            self._end_outage()
        return answer

    def _unreachable(self, reason: str) -> ReceiptLogUnreachable:
        return ReceiptLogUnreachable(f"The receipt log at {self.place} is unreachable: {reason.rstrip('.')}.")

    async def _connect(self, connection: Any) -> None:
        """Log in, and check the server: after a restart it may be another one, or have another configuration."""
        await connection.on_connect()
        found: dict[str, str | None] = {}
        for name in durability.READ:
            await connection.send_command("CONFIG", "GET", name)  # all of them before the first answer is read
        for name in durability.READ:
            try:
                found |= _pairs(await connection.read_response())
            except redis.ResponseError as error:
                if isinstance(error, redis.BusyLoadingError):
                    raise
                found[name] = None
        try:
            self._refuse(found)
        except NotDurable:
            await connection.disconnect()  # the pool would keep it open
            raise

    async def _check(self) -> None:
        found: dict[str, str | None] = {}
        pipeline = self.client.pipeline(transaction=False)
        for name in durability.READ:
            pipeline.config_get(name)
        *answers, memory = await pipeline.info("memory").execute(raise_on_error=False)
        for name, answer in zip(durability.READ, answers, strict=True):
            found |= {name: None} if isinstance(answer, redis.ResponseError) else answer
        self._refuse(found)
        if isinstance(memory, Exception):
            raise memory
        limit = int(memory.get("maxmemory", 0))
        self.is_full = bool(limit) and int(memory["used_memory"]) > limit * MEMORY_SHARE

    def _refuse(self, found: dict[str, str | None]) -> None:
        if fault := durability.fault_of(found):
            self._checked_at = 0.0
            raise NotDurable(f"The Redis at {self.place} may lose what it has answered: {fault}.")

    def _begin_outage(self, error: ReceiptLogUnreachable) -> None:
        if self._outage is None:
            logger.critical("%s", error.message, extra={"event": "receipt_log_down", "code": error.code})
        self._outage = error

    def _end_outage(self) -> None:
        if self._outage is not None:
            self._outage = None
            logger.warning("The receipt log answers again.", extra={"event": "receipt_log_up"})


def _pairs(answer: Any) -> dict[str, str | None]:
    """Return the answer of CONFIG GET: pairs as a flat list, or as a map in the third version of the protocol."""
    if isinstance(answer, dict):
        return answer
    return dict(zip(answer[::2], answer[1::2], strict=True))
