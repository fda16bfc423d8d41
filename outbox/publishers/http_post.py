"""POSTs to one address: guarded, signed, limited in size and time. Webhooks and the stages of workflows send them.

A request ends with an `Answer`, whatever its status; with `NoAnswer`, and nobody knows whether it has arrived; or with
`NotAsked`, because the address is forbidden (`address_guard`) or cannot be used: waiting changes nothing there.

An answer that comes too late is none, and the request is sent again; `Idempotency-Key` is the same then. With a secret,
`Celeriac-Signature: v1=HEX` is the HMAC-SHA256 of "ID.TIMESTAMP." and the body. Redirects are never followed: they
could lead anywhere. No sentence shows more of the address than scheme, host and port: the rest may hold tokens.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import logging
import re
import ssl
import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Final
from urllib.parse import unquote, unquote_plus

import httpcore2
import httpx2

from outbox.publishers.address_guard import ForbiddenAddress, GuardedNetwork, Resolve, look_up

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
class Answer:
    """What somebody said; of what is too long, its beginning."""

    status: int
    headers: Mapping[bytes, bytes]  # by their names in small letters
    body: bytes
    is_too_long: bool = False
    is_broken_off: bool = False

    @property
    def retry_after_seconds(self) -> float | None:
        return retry_after_seconds(self.headers.get(b"retry-after", b""), now=time.time())


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """Nobody knows whether it has arrived."""

    reason: str


@dataclass(frozen=True, slots=True)
class NotAsked:
    """Nothing was sent, and nothing will be until somebody corrects the address."""

    reason: str


class Poster:
    """One address. Not to be called from a coroutine, since it runs its own event loop.

    asyncio, because only there one line limits a whole request: threads have a limit for each read, and a server that
    sends a byte per second never meets it. The loop outlives a call, and with it the connections. And httpcore2, the
    engine of httpx2, because a client on top of it knows cookies, redirects, proxies from the environment and a log of
    addresses, all of which would have to be switched off.
    """

    def __init__(
        self,
        url: str,
        *,
        path: str = "",  # to be added to the address, and no secret
        secret: str | None = None,
        bearer: str | None = None,
        allow_private: bool = False,
        allow_http: bool = False,
        patience: Patience | None = None,
        body_limit: int = BODY_LIMIT,
        resolve: Resolve = look_up,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self.patience = patience or Patience()
        self.body_limit = body_limit
        self.allow_private = allow_private
        self.resolve = resolve
        self.ssl_context = ssl_context
        self._secret = secret
        self._bearer = bearer
        self._line: _Line | None = None
        self._url = _parsed(_joined(url, path))
        self._hidden = _hidden(_parsed(url), bearer or "")
        self.objection = _objection(self._url, secret, allow_http=allow_http)

    def post(self, body: bytes, *, key: str, traceparent: object = None) -> Answer | NoAnswer | NotAsked:
        """One request, and its answer."""
        if self.objection:
            return NotAsked(self.objection)
        line = self._open()
        return line.runner.run(self._send(line.pool, body, key, traceparent))

    def close(self) -> None:
        line, self._line = self._line, None
        if line:
            try:
                line.runner.run(line.pool.aclose())
            finally:
                line.runner.close()
                line.network.close()

    @property
    def origin(self) -> str:
        """What may be shown of the address."""
        host = self._url.netloc.decode().removesuffix(f":{self._url.port}")
        return f"{self._url.scheme}://{host}:{self._url.port or DEFAULT_PORTS[self._url.scheme]}"

    def shown(self, raw: bytes) -> str:
        """What somebody else wrote, fit for a log: one short printable line that does not repeat our tokens."""
        printable = "".join(one if one.isprintable() else " " for one in raw.decode(errors="replace"))
        return self._hidden.sub("…", " ".join(printable.split()))[:TEXT_LIMIT]

    def _open(self) -> _Line:
        if self._line is None:
            network = GuardedNetwork(allow_private=self.allow_private, resolve=self.resolve)
            needs_tls = self._url.scheme == "https"
            pool = httpcore2.AsyncConnectionPool(
                ssl_context=self.ssl_context or (_tls() if needs_tls else None),
                max_connections=AT_ONCE,
                keepalive_expiry=self.patience.keep_seconds,
                network_backend=network,
            )
            self._line = _Line(asyncio.Runner(loop_factory=asyncio.new_event_loop), network, pool)
        return self._line

    async def _send(
        self, pool: httpcore2.AsyncConnectionPool, body: bytes, key: str, traceparent: object
    ) -> Answer | NoAnswer | NotAsked:
        request = pool.stream(
            "POST",
            httpcore2.URL(
                scheme=self._url.raw_scheme,
                host=self._url.raw_host,
                port=self._url.port,
                target=self._url.raw_path,
            ),
            headers=self._headers(body, key, traceparent),
            content=body,
            extensions={"timeout": {"connect": self.patience.connect_seconds}},
        )
        answer: httpcore2.Response | None = None
        text, is_broken_off = b"", False
        try:
            async with (
                asyncio.timeout(self.patience.request_seconds),
                request as answer,
                aclosing(answer.aiter_stream()) as chunks,
            ):
                async for chunk in chunks:
                    text += chunk
                    if len(text) > self.body_limit:
                        break
        except ForbiddenAddress as error:
            return NotAsked(f"{self.origin} was not asked: {error}.")
        except HTTP_ERRORS as error:
            if answer is None:
                return NoAnswer(self._reason(error))
            is_broken_off = True
        assert answer is not None
        headers = {name.lower(): value for name, value in answer.headers}
        return Answer(answer.status, headers, text[: self.body_limit], len(text) > self.body_limit, is_broken_off)

    def _headers(self, body: bytes, key: str, traceparent: object) -> dict[bytes | str, bytes | str]:
        timestamp = int(time.time())  # the wall clock: receivers refuse old requests by it, we decide nothing
        headers: dict[bytes | str, bytes | str] = {
            "Host": self._url.netloc,
            "Content-Type": "application/json",
            "User-Agent": "Celeriac",
            "Idempotency-Key": key,
            "Celeriac-Event-Id": key,
            "Celeriac-Timestamp": str(timestamp),
        }
        if self._secret is not None:
            signed = f"{key}.{timestamp}.".encode() + body
            headers["Celeriac-Signature"] = f"v1={hmac.digest(self._secret.encode(), signed, 'sha256').hex()}"
        if self._bearer:
            headers["Authorization"] = f"Bearer {self._bearer}"
        elif self._url.userinfo:
            headers["Authorization"] = f"Basic {_credentials(self._url)}"
        if isinstance(traceparent, str) and TRACEPARENT.fullmatch(traceparent):
            headers["traceparent"] = traceparent
        return headers

    def _reason(self, error: Exception) -> str:
        match error:
            case httpcore2.ConnectTimeout():
                return f"no connection within {self.patience.connect_seconds:g} s"
            case httpcore2.ConnectError():
                cause: BaseException = error
                while cause.__cause__:
                    cause = cause.__cause__
                return f"no connection: {self.shown(str(cause).encode())}"
            case TimeoutError():
                return f"nothing within {self.patience.request_seconds:g} s"
            case httpcore2.ProtocolError():  # its text would repeat what the server sent
                return "it hung up without an answer, or does not speak HTTP"
            case _:
                return "the connection broke"


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


@cache
def _tls() -> ssl.SSLContext:
    """Made once: the pool would read all certificates of the system for each connection."""
    return httpcore2.default_ssl_context()


def _joined(url: str, path: str) -> str:
    """The path goes before the query."""
    address, mark, query = url.partition("?")
    return f"{address.rstrip('/')}{path}{mark}{query}" if path else url


def _parsed(url: str) -> httpx2.URL:
    try:
        return httpx2.URL(url)
    except httpx2.InvalidURL:
        return httpx2.URL()


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


def _hidden(url: httpx2.URL, *more: str) -> re.Pattern[str]:
    """The parts of an address that may be tokens, to be found in what a server says: error pages like to repeat them.

    Shorter parts than four letters are words, not secrets.
    """
    target = url.raw_path.decode()
    parts = {target, target.partition("?")[0], url.path, *re.split("[/?&=;,]", target), *url.path.split("/")}
    parts |= {unquote(part) for part in parts} | {unquote_plus(part) for part in parts}
    parts |= {url.username, url.password, url.userinfo.decode(), _credentials(url), *more}
    longest_first = sorted((part for part in parts if len(part) >= 4), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)", re.IGNORECASE)
