"""Which addresses a request may reach: the guard against requests forged to reach our own servers (SSRF).

The guard sits where a connection is made, below TLS and HTTP, so that no spelling of a host gets around it:

    name ─► all of its addresses, looked up once ─► every one is judged ─► a connection to one of these very addresses

There is no second look-up between judging and connecting, so a name that changes its address in between (DNS rebinding)
gains nothing. One forbidden address among several forbids the name. TLS and the Host header still carry the name.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

import httpcore2

Kinds = dict[IPv4Network | IPv6Network, str]
Resolve = Callable[[str, int], Sequence[str]]
LOOK_UPS_AT_ONCE: Final = 16


class ForbiddenAddress(Exception):
    """No connection was made: the guard forbids the address. The sentence names nothing but the address."""


def _kinds(**kinds: str) -> Kinds:
    return {ip_network(network): kind.replace("_", " ") for kind, row in kinds.items() for network in row.split()}


# The networks of an operator's own: `allow_private` permits them.
PRIVATE: Final = _kinds(
    loopback="127.0.0.0/8 ::1/128",
    private_network="10.0.0.0/8 172.16.0.0/12 192.168.0.0/16",
    carrier_NAT="100.64.0.0/10",
    unique_local="fc00::/7",
)
# Nobody's webhook lives there, and link-local is where clouds keep the credentials of their machines.
NEVER: Final = _kinds(
    unspecified="0.0.0.0/8 ::/128",
    link_local="169.254.0.0/16 fe80::/10",
    cloud_host="168.63.129.16/32",  # Azure's, although it looks public
    multicast="224.0.0.0/4 ff00::/8",
    reserved="192.0.0.0/24 240.0.0.0/4 2001::/23",  # with broadcast, and with Teredo
    documentation="192.0.2.0/24 198.51.100.0/24 203.0.113.0/24 2001:db8::/32 3fff::/20",
    benchmark="198.18.0.0/15",
    tunnel="192.88.99.0/24 2002::/16 64:ff9b:1::/48",  # 6to4 and local NAT64: any IPv4 address may be inside
)
GLOBAL_UNICAST: Final = IPv6Network("2000::/3")
NAT64: Final = IPv6Network("64:ff9b::/96")


def check_address(text: str, *, allow_private: bool) -> None:
    """Raises ForbiddenAddress unless the address is public, or private and that is allowed."""
    address = _reached(ip_address(text))
    if kind := _kind(address, NEVER):
        raise ForbiddenAddress(f"{text} is an address that no destination may have ({kind})")
    if kind := _kind(address, PRIVATE):
        if not allow_private:
            raise ForbiddenAddress(
                f"{text} is a private address ({kind}); if that is meant, allow_private=1 permits it"
            )
    elif isinstance(address, IPv6Address) and address not in GLOBAL_UNICAST:
        raise ForbiddenAddress(f"{text} is an address that no destination may have (not public)")


def look_up(host: str, port: int) -> list[str]:
    """The addresses of a host, in the order in which the system would try them."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


class GuardedNetwork(httpcore2.AsyncNetworkBackend):
    """Makes httpcore2's connections, to judged addresses only."""

    def __init__(self, *, allow_private: bool, resolve: Resolve = look_up) -> None:
        self.allow_private = allow_private
        self.resolve = resolve
        self.network = httpcore2.AnyIOBackend()
        # Not the event loop's own threads: closing the loop would wait for a name server that does not answer.
        self.threads = ThreadPoolExecutor(LOOK_UPS_AT_ONCE, thread_name_prefix="look-up")

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        try:
            async with asyncio.timeout(timeout) as limit:
                addresses = await self._judged_addresses(host, port)
                connect = partial(self.network.connect_tcp, local_address=local_address, socket_options=socket_options)
                return await _first_that_answers(connect, addresses, port, limit.when())
        except TimeoutError:
            raise httpcore2.ConnectTimeout from None

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)

    async def _judged_addresses(self, host: str, port: int) -> Sequence[str]:
        loop = asyncio.get_running_loop()
        try:
            addresses = await loop.run_in_executor(self.threads, self.resolve, host, port)
        except (OSError, UnicodeError) as error:  # UnicodeError: a label that no name server could be asked for
            raise httpcore2.ConnectError(f"the name cannot be looked up: {error}") from None
        if not addresses:
            raise httpcore2.ConnectError("the name has no address")
        for address in addresses:
            check_address(address, allow_private=self.allow_private)
        return addresses


def _reached(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """The address where packets would end: the IPv4 address inside, if there is one."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped:
            return address.ipv4_mapped
        if address in NAT64:
            return IPv4Address(int(address) & 0xFFFF_FFFF)
    return address


def _kind(address: IPv4Address | IPv6Address, kinds: Kinds) -> str | None:
    return next((kind for network, kind in kinds.items() if address in network), None)


async def _first_that_answers(
    connect: Callable[[str, int, float | None], Awaitable[httpcore2.AsyncNetworkStream]],
    addresses: Sequence[str],
    port: int,
    deadline: float | None,
) -> httpcore2.AsyncNetworkStream:
    """One after the other, each with its share of the time, so that a silent one leaves some to the next."""
    for left in range(len(addresses), 1, -1):
        try:
            return await connect(addresses[-left], port, _share(deadline, left))
        except (httpcore2.ConnectError, httpcore2.ConnectTimeout):
            continue
    return await connect(addresses[-1], port, _share(deadline, 1))


def _share(deadline: float | None, left: int) -> float | None:
    return None if deadline is None else (deadline - asyncio.get_running_loop().time()) / left
