"""Tokens that were checked lately, so that messages are accepted while PostgreSQL is slow or down.

    checked within FRESH_SECONDS    used as it is; after a second it is checked again in the background
    older                           the ledger is asked, and for a short time only
    the ledger does not answer      used for RECEIPT_TOKEN_SECONDS after it was last checked

So a token that was revoked or has expired may still be accepted for FRESH_SECONDS, and during an outage of the ledger
for RECEIPT_TOKEN_SECONDS. This applies to routes that answer `accepted` and to reading receipts and the status of a
task; all other routes ask the ledger every time.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Final

import settings
from api import tokens
from api.ledger_calls import call_ledger
from api.tokens import Token, Unauthenticated
from models.database_errors import translate
from models.engine import engine
from models.errors import LedgerBusy, Unreachable

logger = logging.getLogger(__name__)

FRESH_SECONDS: Final = 10.0
AGAIN_SECONDS: Final = 1.0
ASK_SECONDS: Final = 1.0
MOST: Final = 10_000


@dataclass(slots=True)
class _Checked:
    token: Token
    at: float
    is_being_checked: bool = False


class TokenCache:
    """The tokens of one process, by the hash of their secret."""

    def __init__(self) -> None:
        self._checked: OrderedDict[bytes, _Checked] = OrderedDict()
        self._background: set[asyncio.Task[None]] = set()

    async def authenticate(self, secret: str, *, prefers_ledger: bool = False) -> Token:
        """Return the token, or raise Unauthenticated; raise Unreachable if only the ledger could tell.

        `prefers_ledger`: ask the ledger first, and use what is remembered only if it does not answer.
        """
        key = hashlib.sha256(secret.encode()).digest()
        found = self._checked.get(key)
        age = time.monotonic() - found.at if found else float("inf")
        if found is not None and age <= FRESH_SECONDS and not prefers_ledger:
            if age > AGAIN_SECONDS and not found.is_being_checked:
                found.is_being_checked = True
                self._start(self._check_again(key, secret))
            return found.token
        try:
            return await self._ask(key, secret)
        except Unauthenticated:
            raise
        except Exception as error:
            is_down = isinstance(translate(error) or error, Unreachable | LedgerBusy | TimeoutError)
            if is_down and found is not None and age <= settings.current().receipt_token_seconds:
                return found.token
            raise

    async def _ask(self, key: bytes, secret: str) -> Token:
        try:
            async with asyncio.timeout(ASK_SECONDS if key in self._checked else None):
                token = await call_ledger(lambda: tokens.authenticate(engine(), secret))
        except Unauthenticated:
            self._checked.pop(key, None)
            raise
        except TimeoutError:
            raise Unreachable(f"The ledger did not answer within {ASK_SECONDS:g} s.") from None
        self._checked[key] = _Checked(token, time.monotonic())
        self._checked.move_to_end(key)
        while len(self._checked) > MOST:
            self._checked.popitem(last=False)
        return token

    async def _check_again(self, key: bytes, secret: str) -> None:
        try:
            await self._ask(key, secret)
        except Unauthenticated:
            logger.info(
                "A token that was revoked or has expired is refused from now on.", extra={"event": "token_refused"}
            )
        except Exception:  # the next request tries again
            logger.debug("A token could not be checked.", exc_info=True, extra={"event": "token_not_checked"})
        finally:
            if found := self._checked.get(key):
                found.is_being_checked = False

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)  # the event loop keeps only weak references
        task.add_done_callback(self._background.discard)


cache: Final = TokenCache()
