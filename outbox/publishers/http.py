"""Webhooks: an event is one POST, up to 16 of them at once on connections that are kept.

The body is the payload as JSON, and the status alone says what became of it:

    2xx                  Sent; the external id is the receiver's X-Request-Id, by which its logs can be searched
    408, 425, 429, 5xx   Failed, to be tried again no sooner than Retry-After
    3xx                  Refused: a redirect is never followed, it could lead anywhere
    all others           Refused
    no answer in time    DestinationDown if nobody has answered at all, otherwise Failed: it may have arrived

An answer that comes too late is none, and its event is sent again; `Idempotency-Key` is the same then. With a secret,
`Celeriac-Signature: v1=HEX` is the HMAC-SHA256 of "ID.TIMESTAMP." and the body. No header comes from a row, but for a
`traceparent` that is one. No error shows more of the address than scheme, host and port: the rest may hold tokens.

A forbidden address (`address_guard`) is Refused and not DestinationDown: somebody has to correct the destination or to
write allow_private=1, waiting changes nothing. The dead events say so and can be requeued.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import logging
import re
import ssl
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import ClassVar, Final
from urllib.parse import unquote, unquote_plus

import httpcore2
import httpx2

from outbox.lease import ClaimedEvent
from outbox.publishers.address_guard import ForbiddenAddress, GuardedNetwork, Resolve, look_up
from outbox.publishers.contract import DestinationDown, Failed, NotTried, Refused, Result, Sent

AT_ONCE: Final = 16
BODY_LIMIT: Final = 64 * 1024  # of an answer; a connection whose answer is longer is closed, not read to its end
TEXT_LIMIT: Final = 200
DAY_SECONDS: Final = 86_400.0
TRY_AGAIN: Final = {408, 425, 429, *range(500, 600)}
DEFAULT_PORTS: Final = {"http": 80, "https": 443}
TRACEPARENT: Final = re.compile("(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
HTTP_ERRORS: Final = (OSError, httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException)

# At DEBUG it writes down what servers answer, and an answer may repeat the tokens of the request.
logging.getLogger("httpcore2").setLevel(logging.INFO)


@dataclass(frozen=True, slots=True)
class Patience:
    """The time limits. A batch may take batch_seconds + request_seconds, which is well below a lease."""

    connect_seconds: float = 3.0
    request_seconds: float = 10.0  # from the look-up of the name to the last byte of the answer
    batch_seconds: float = 20.0  # what has not begun by then is not tried
    keep_seconds: float = 2.0  # an idle connection; servers hang up after 5 s, and a request must not cross that


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """Nobody knows whether it has arrived."""

    reason: str


class HttpPublisher:
    """One address. Not to be called from a coroutine, since it runs its own event loop.

    asyncio, because only there one line limits a whole request: threads have a limit for each read, and a server that
    sends a byte per second never meets it. The loop outlives a call, and with it the connections. And httpcore2, the
    engine of httpx2, because a client on top of it knows cookies, redirects, proxies from the environment and a log of
    addresses, all of which would have to be switched off.
    """

    is_slow: ClassVar[bool] = True

    def __init__(
        self,
        url: str,
        *,
        secret: str | None,
        allow_private: bool = False,
        allow_http: bool = False,
        patience: Patience | None = None,
        resolve: Resolve = look_up,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self.patience = patience or Patience()
        self.allow_private = allow_private
        self.resolve = resolve
        self.ssl_context = ssl_context
        self._secret = secret
        self._line: _Line | None = None
        try:
            self._url = httpx2.URL(url)
        except httpx2.InvalidURL:
            self._url = httpx2.URL()
        self._hidden = _hidden(self._url)
        self.objection = _objection(self._url, secret, allow_http=allow_http)

    def publish(self, events: Sequence[ClaimedEvent]) -> Sequence[Result]:
        if self.objection:
            return [Refused(self.objection)] * len(events)
        self._line = self._line or self._open()
        results = self._line.runner.run(self._send_all(events, self._line.pool))
        silent = [result for result in results if isinstance(result, NoAnswer)]
        if silent and all(isinstance(result, NoAnswer | NotTried) for result in results):
            self.close()
            raise DestinationDown(f"{self.origin} does not answer: {silent[0].reason}")
        return [Failed(f"no answer: {result.reason}") if isinstance(result, NoAnswer) else result for result in results]

    def close(self) -> None:
        line, self._line = self._line, None
        if line:
            line.runner.run(line.pool.aclose())
            line.runner.close()
            line.network.close()

    @property
    def origin(self) -> str:
        """What may be shown of the address."""
        host = self._url.netloc.decode().removesuffix(f":{self._url.port}")
        return f"{self._url.scheme}://{host}:{self._url.port or DEFAULT_PORTS[self._url.scheme]}"

    def _open(self) -> _Line:
        network = GuardedNetwork(allow_private=self.allow_private, resolve=self.resolve)
        needs_tls = self._url.scheme == "https"
        pool = httpcore2.AsyncConnectionPool(
            # made here, because the pool would read the certificates of the system for each connection
            ssl_context=self.ssl_context or (httpcore2.default_ssl_context() if needs_tls else None),
            max_connections=AT_ONCE,
            keepalive_expiry=self.patience.keep_seconds,
            network_backend=network,
        )
        return _Line(asyncio.Runner(loop_factory=asyncio.new_event_loop), network, pool)

    async def _send_all(
        self, events: Sequence[ClaimedEvent], pool: httpcore2.AsyncConnectionPool
    ) -> list[Result | NoAnswer]:
        """Ends early if as many as are sent at once got no answer, and nobody else has got one."""
        results: list[Result | NoAnswer] = [NotTried()] * len(events)
        places = iter(range(len(events)))  # shared: each place is taken once
        over_at = time.monotonic() + self.patience.batch_seconds
        silent = 0
        somebody_is_there = False

        async def work() -> None:
            nonlocal silent, somebody_is_there
            for place in places:
                results[place] = result = await self._send(events[place], pool)
                if isinstance(result, NoAnswer):
                    silent += 1
                else:
                    somebody_is_there = True
                if time.monotonic() >= over_at or (silent >= AT_ONCE and not somebody_is_there):
                    return

        async with asyncio.TaskGroup() as workers:
            for _ in range(min(AT_ONCE, len(events))):
                workers.create_task(work())
        return results

    async def _send(self, event: ClaimedEvent, pool: httpcore2.AsyncConnectionPool) -> Result | NoAnswer:
        body = json.dumps(event.payload, ensure_ascii=False, separators=(",", ":")).encode()
        request = pool.stream(
            "POST",
            httpcore2.URL(
                scheme=self._url.raw_scheme,
                host=self._url.raw_host,
                port=self._url.port,
                target=self._url.raw_path,
            ),
            headers=self._headers(event, body),
            content=body,
            extensions={"timeout": {"connect": self.patience.connect_seconds}},
        )
        answer: httpcore2.Response | None = None
        text = b""
        try:
            async with (
                asyncio.timeout(self.patience.request_seconds),
                request as answer,
                aclosing(answer.aiter_stream()) as chunks,
            ):
                async for chunk in chunks:
                    text += chunk
                    if len(text) >= BODY_LIMIT:
                        break
        except ForbiddenAddress as error:
            return Refused(f"{self.origin} was not asked: {error}.")
        except HTTP_ERRORS as error:
            if answer is None:
                return NoAnswer(self._reason(error))
        assert answer is not None
        return self._result(answer, text)

    def _headers(self, event: ClaimedEvent, body: bytes) -> dict[bytes | str, bytes | str]:
        timestamp = int(time.time())  # the wall clock: receivers refuse old requests by it, we decide nothing
        headers: dict[bytes | str, bytes | str] = {
            "Host": self._url.netloc,
            "Content-Type": "application/json",
            "User-Agent": "Celeriac",
            "Idempotency-Key": str(event.id),
            "Celeriac-Event-Id": str(event.id),
            "Celeriac-Timestamp": str(timestamp),
        }
        if self._secret is not None:
            signed = f"{event.id}.{timestamp}.".encode() + body
            headers["Celeriac-Signature"] = f"v1={hmac.digest(self._secret.encode(), signed, 'sha256').hex()}"
        if self._url.userinfo:
            headers["Authorization"] = f"Basic {_credentials(self._url)}"
        traceparent = event.headers.get("traceparent")
        if isinstance(traceparent, str) and TRACEPARENT.fullmatch(traceparent):
            headers["traceparent"] = traceparent
        return headers

    def _result(self, answer: httpcore2.Response, body: bytes) -> Result:
        headers = {name.lower(): value for name, value in answer.headers}
        if 200 <= answer.status < 300:
            return Sent(self._shown(headers.get(b"x-request-id", b"")) or None)
        if 300 <= answer.status < 400:
            return Refused(f"{self.origin} answered {answer.status}: redirects are not followed, correct its address.")
        error = f"{self.origin} answered {answer.status}: {self._shown(body) or 'without a word'}"
        if answer.status in TRY_AGAIN:
            return Failed(error, retry_after_seconds(headers.get(b"retry-after", b""), now=time.time()))
        return Refused(error)

    def _reason(self, error: Exception) -> str:
        match error:
            case httpcore2.ConnectTimeout():
                return f"no connection within {self.patience.connect_seconds:g} s"
            case httpcore2.ConnectError():
                cause: BaseException = error
                while cause.__cause__:
                    cause = cause.__cause__
                return f"no connection: {self._shown(str(cause).encode())}"
            case TimeoutError():
                return f"nothing within {self.patience.request_seconds:g} s"
            case httpcore2.ProtocolError():  # its text would repeat what the server sent
                return "it hung up without an answer, or does not speak HTTP"
            case _:
                return "the connection broke"

    def _shown(self, raw: bytes) -> str:
        """What somebody else wrote, fit for a log: one short printable line that does not repeat our tokens."""
        printable = "".join(one if one.isprintable() else " " for one in raw.decode(errors="replace"))
        return self._hidden.sub("…", " ".join(printable.split()))[:TEXT_LIMIT]


@dataclass(frozen=True, slots=True)
class _Line:
    """What is open between two calls."""

    runner: asyncio.Runner
    network: GuardedNetwork
    pool: httpcore2.AsyncConnectionPool


def retry_after_seconds(value: bytes, *, now: float) -> float | None:
    """The wait that a server asks for, in seconds or until a date; at most a day. None if that is nonsense."""
    text = value.decode("latin-1").strip()
    if re.fullmatch("[0-9]{1,9}", text):
        return min(float(text), DAY_SECONDS)
    try:
        seconds = parsedate_to_datetime(text).timestamp() - now
    except (ValueError, OverflowError):
        return None
    return min(seconds, DAY_SECONDS) if seconds > 0 else None


def _objection(url: httpx2.URL, secret: str | None, *, allow_http: bool) -> str | None:
    """Why nothing can be sent at all, or None. Said for each event, because a row must not stop the relay."""
    if not url.host or url.scheme not in DEFAULT_PORTS:
        return "The destination's address is no https:// address with a host."
    if url.port is not None and not 0 < url.port < 65536:
        return f"The destination's address has the port {url.port}, and there is none."
    if url.scheme == "http" and not allow_http:
        return "The destination's address is http://, which anybody may read on the way: use https://, or allow_http=1."
    if secret == "":
        return "The destination's secret is empty: anybody could sign with it."
    return None


def _credentials(url: httpx2.URL) -> str:
    return base64.b64encode(f"{url.username}:{url.password}".encode()).decode()


def _hidden(url: httpx2.URL) -> re.Pattern[str]:
    """The parts of an address that may be tokens, to be found in what a server says: error pages like to repeat them.

    Shorter parts than four letters are words, not secrets.
    """
    target = url.raw_path.decode()
    parts = {target, target.partition("?")[0], url.path, *re.split("[/?&=;,]", target), *url.path.split("/")}
    parts |= {unquote(part) for part in parts} | {unquote_plus(part) for part in parts}
    parts |= {url.username, url.password, url.userinfo.decode(), _credentials(url)}
    longest_first = sorted((part for part in parts if len(part) >= 4), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)", re.IGNORECASE)
