"""POST requests to one address: guarded, signed, limited in size and time. Webhooks and workflow stages use them.

A request ends in one of three ways. `Answer`: the server answered, with any status. `NoAnswer`: it is unknown whether
the request has arrived. `NotAsked`: nothing was sent, because the address is forbidden (address_guard.py) or cannot be
used; waiting does not change that.

An answer that comes too late counts as no answer. The request is then sent again with the same `Idempotency-Key`. With
a secret, `Celeriac-Signature: v1=HEX` is the HMAC-SHA256 of "ID.TIMESTAMP." and the body. Redirects are never followed:
they could lead anywhere. No message shows more of the address than scheme, host and port: the rest may contain tokens.
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
from dataclasses import KW_ONLY, dataclass
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Final
from urllib.parse import unquote, unquote_plus

import httpcore2
import httpx2

from outbox.publishers.address_guard import ForbiddenAddress, GuardedNetwork, Resolve, look_up

Pool = httpcore2.AsyncConnectionPool
Client = tuple[asyncio.Runner, GuardedNetwork, Pool]  # open between calls
AT_ONCE: Final = 16
BODY_LIMIT: Final = 64 * 1024  # bytes of an answer; if it is longer, the connection is closed
TEXT_LIMIT: Final = 200
DAY_SECONDS: Final = 86_400.0
TRY_AGAIN: Final = {408, 425, 429, *range(500, 600)}
DEFAULT_PORTS: Final = {"http": 80, "https": 443}
TRACEPARENT: Final = re.compile("(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
HTTP_ERRORS: Final = (OSError, httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException)

# At DEBUG level httpcore2 logs what servers answer, and an answer may repeat the tokens of the request.
logging.getLogger("httpcore2").setLevel(logging.INFO)


@dataclass(frozen=True, slots=True)
class Patience:
    """The time limits. A batch takes at most batch_seconds + request_seconds, which is well below a lease."""

    connect_seconds: float = 3.0
    request_seconds: float = 10.0  # from the look-up of the name to the last byte of the answer
    batch_seconds: float = 20.0  # no request of a batch starts later
    keep_seconds: float = 2.0  # for an idle connection; many servers close it after 5 s, perhaps just as we write


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a server. A body that is too long is cut off."""

    status: int
    headers: Mapping[bytes, bytes]  # by name, in lower case
    body: bytes
    is_too_long: bool = False
    broken_off: str = ""  # why the body is incomplete
    is_late: bool = False  # because of our time limit for the request

    @property
    def retry_after_seconds(self) -> float | None:
        return retry_after_seconds(self.headers.get(b"retry-after", b""), now=time.time())


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """It is unknown whether the request has arrived."""

    reason: str
    is_late: bool = False  # our time limit for the request ended it


@dataclass(frozen=True, slots=True)
class NotAsked:
    """Nothing was sent, and nothing can be until an operator corrects the address."""

    reason: str


@dataclass(repr=False, eq=False)
class Poster:
    """Send requests to one address. It runs its own event loop, so do not call it from a coroutine.

    It uses asyncio because `asyncio.timeout` limits a whole request. A blocking socket limits each read only, and a
    server that sends one byte per second never exceeds that. The loop lives on between calls, and with it the
    connections. It uses httpcore2, the layer below httpx2, because the client on top has cookies, redirects, proxies
    from the environment and a log of addresses, all of which would have to be switched off.
    """

    url: str
    _: KW_ONLY
    path: str = ""  # appended to the address; not a secret
    secret: str | None = None
    bearer: str | None = None
    allow_private: bool = False
    allow_http: bool = False
    patience: Patience = Patience()
    body_limit: int = BODY_LIMIT
    resolve: Resolve = look_up
    ssl_context: ssl.SSLContext | None = None
    _client: Client | None = None

    def __post_init__(self) -> None:
        self._url = _parsed(_joined(self.url, self.path))
        self._hidden = _hidden(_parsed(self.url), self.bearer or "")
        self.objection = _objection(self._url, self.secret, allow_http=self.allow_http)

    def post(self, body: bytes, *, key: str, traceparent: object = None) -> Answer | NoAnswer | NotAsked:
        """Send one request and return its answer."""
        if self.objection:
            return NotAsked(self.objection)
        runner, _, pool = self._open()
        return runner.run(self._send(pool, body, key, traceparent))

    def close(self) -> None:
        client, self._client = self._client, None
        if client:
            runner, network, pool = client
            try:
                runner.run(pool.aclose())
            finally:
                runner.close()
                network.close()

    @property
    def origin(self) -> str:
        """Return the part of the address that may be shown."""
        host = self._url.netloc.decode().removesuffix(f":{self._url.port}")
        return f"{self._url.scheme}://{host}:{self._url.port or DEFAULT_PORTS[self._url.scheme]}"

    def shown(self, raw: bytes) -> str:
        """Return text from a server in a form fit for a log: one short printable line without our tokens."""
        printable = "".join(one if one.isprintable() else " " for one in raw.decode(errors="replace"))
        return self._hidden.sub("…", " ".join(printable.split()))[:TEXT_LIMIT]

    def _open(self) -> Client:
        if self._client is None:
            network = GuardedNetwork(allow_private=self.allow_private, resolve=self.resolve)
            pool = Pool(
                ssl_context=self.ssl_context or (_tls() if self._url.scheme == "https" else None),
                max_connections=AT_ONCE,
                keepalive_expiry=self.patience.keep_seconds,
                network_backend=network,
            )
            self._client = (asyncio.Runner(loop_factory=asyncio.new_event_loop), network, pool)
        return self._client

    async def _send(self, pool: Pool, body: bytes, key: str, traceparent: object) -> Answer | NoAnswer | NotAsked:
        url = self._url
        request = pool.stream(
            "POST",
            httpcore2.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
            headers=self._headers(body, key, traceparent),
            content=body,
            extensions={"timeout": {"connect": self.patience.connect_seconds}},
        )
        answer: httpcore2.Response | None = None
        text, broken_off, is_late = b"", "", False
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
            is_late = isinstance(error, TimeoutError)
            if answer is None:
                return NoAnswer(self._reason(error), is_late)
            seconds = f"{self.patience.request_seconds:g} s"
            broken_off = f"it was not complete within {seconds}" if is_late else "the connection was lost"
        assert answer is not None
        headers = {name.lower(): value for name, value in answer.headers}
        is_too_long = len(text) > self.body_limit
        return Answer(answer.status, headers, text[: self.body_limit], is_too_long, broken_off, is_late)

    def _headers(self, body: bytes, key: str, traceparent: object) -> dict[bytes | str, bytes | str]:
        timestamp = int(time.time())  # the wall clock: receivers use it to reject old requests
        headers: dict[bytes | str, bytes | str] = {
            "Host": self._url.netloc,
            "Content-Type": "application/json",
            "User-Agent": "Celeriac",
            "Idempotency-Key": key,
            "Celeriac-Event-Id": key,
            "Celeriac-Timestamp": str(timestamp),
        }
        if self.secret is not None:
            signed = f"{key}.{timestamp}.".encode() + body
            headers["Celeriac-Signature"] = f"v1={hmac.digest(self.secret.encode(), signed, 'sha256').hex()}"
        if self.bearer:
            headers["Authorization"] = f"Bearer {self.bearer}"
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
                return f"no answer within {self.patience.request_seconds:g} s"
            case httpcore2.ProtocolError():  # its text would repeat what the server sent
                return "it closed the connection without an answer, or does not speak HTTP"
            case _:
                return "the connection was lost"


def retry_after_seconds(value: bytes, *, now: float) -> float | None:
    """Return the wait that a Retry-After header asks for, at most a day, or None if the header is invalid."""
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
    """Return a shared context: the pool would read all certificates of the system for each connection."""
    return httpcore2.default_ssl_context()


def _joined(url: str, path: str) -> str:
    """Return the address with a path inserted before its query."""
    address, mark, query = url.partition("?")
    return f"{address.rstrip('/')}{path}{mark}{query}" if path else url


def _parsed(url: str) -> httpx2.URL:
    try:
        return httpx2.URL(url)
    except httpx2.InvalidURL:
        return httpx2.URL()


def _objection(url: httpx2.URL, secret: str | None, *, allow_http: bool) -> str | None:
    """Return why the address cannot be used, or None. This must not stop the relay, so it is not an exception."""
    if not url.host or url.scheme not in DEFAULT_PORTS:
        return "The destination's address must be an https:// address with a host."
    if url.port is not None and not 0 < url.port < 65536:
        return f"The destination's address has port {url.port}; ports are 1 to 65535."
    if url.scheme == "http" and not allow_http:
        return "The destination's address is http://, which is not encrypted: use https://, or add allow_http=1."
    if secret == "":
        return "The destination's secret is empty: set one, or leave it out to send unsigned requests."
    return None


def _credentials(url: httpx2.URL) -> str:
    return base64.b64encode(f"{url.username}:{url.password}".encode()).decode()


def _hidden(url: httpx2.URL, *more: str) -> re.Pattern[str]:
    """Return a pattern of the parts of an address that may be tokens: error pages of servers often repeat them.

    Parts of fewer than four characters are not secrets.
    """
    target = url.raw_path.decode()
    parts = {target, target.partition("?")[0], url.path, *re.split("[/?&=;,]", target), *url.path.split("/")}
    parts |= {unquote(part) for part in parts} | {unquote_plus(part) for part in parts}
    parts |= {url.username, url.password, url.userinfo.decode(), _credentials(url), *more}
    longest_first = sorted((part for part in parts if len(part) >= 4), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)", re.IGNORECASE)
