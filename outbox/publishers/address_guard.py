"""Decide which addresses a request may reach, so that it cannot be misused to reach internal servers (SSRF).

The check sits where a connection is made, below TLS and HTTP, so that no spelling of a host gets around it:

    name ─► all of its addresses, looked up once ─► check every one ─► connect to one of these very addresses

There is no second look-up between check and connection, so a name that changes its address in between (DNS rebinding)
gains nothing. If one of several addresses is forbidden, the name is. TLS and the Host header still use the name.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

import httpcore2

Resolve = Callable[[str, int], Sequence[str]]
LOOK_UPS_AT_ONCE: Final = 16

# Networks of an operator's own: loopback, private, carrier-grade NAT, unique local. `allow_private` permits them.
_PRIVATE: Final = "127.0.0.0/8 ::1/128 10.0.0.0/8 172.16.0.0/12 192.168.0.0/16 100.64.0.0/10 fc00::/7"
PRIVATE: Final = [ip_network(network) for network in _PRIVATE.split()]
# Networks without webhooks that `ipaddress` calls global, in some versions of Python: the metadata server of Azure,
# protocol assignments (with Teredo), documentation, and 6to4 and local NAT64, which can contain any IPv4 address.
_NEVER: Final = "168.63.129.16/32 192.0.0.0/24 2001::/23 3fff::/20 192.88.99.0/24 2002::/16 64:ff9b:1::/48"
NEVER: Final = [ip_network(network) for network in _NEVER.split()]
GLOBAL_UNICAST: Final = IPv6Network("2000::/3")
NAT64: Final = IPv6Network("64:ff9b::/96")


class ForbiddenAddress(Exception):
    """The address is forbidden; no connection was made. The message shows nothing but the address."""


def check_address(text: str, *, allow_private: bool) -> None:
    """Raise ForbiddenAddress unless the address is public, or private and that is allowed."""
    address = ip_address(text)
    if isinstance(address, IPv6Address):
        embedded = IPv4Address(int(address) & 0xFFFF_FFFF) if address in NAT64 else address.ipv4_mapped
        address = embedded or address  # packets go to the IPv4 address inside
    if any(address in network for network in PRIVATE):
        if not allow_private:
            raise ForbiddenAddress(f"{text} is a private address; if this is intended, allow it with allow_private=1")
    elif not _is_public(address):
        raise ForbiddenAddress(f"{text} is not a public address")


def look_up(host: str, port: int) -> list[str]:
    """Return the addresses of a host, in the order in which the system would try them."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


class GuardedNetwork(httpcore2.AsyncNetworkBackend):
    """Make the connections of httpcore2, to checked addresses only."""

    def __init__(self, *, allow_private: bool, resolve: Resolve = look_up) -> None:
        self.allow_private = allow_private
        self.resolve = resolve
        self.network = httpcore2.AnyIOBackend()
        # Not the threads of the event loop: closing the loop would wait for a name server that does not answer.
        self.threads = ThreadPoolExecutor(LOOK_UPS_AT_ONCE, thread_name_prefix="look-up")

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Try the addresses one after the other. Each gets its share of the time, in case it is silent."""
        try:
            async with asyncio.timeout(timeout) as limit:
                addresses = await self._checked_addresses(host, port)
                for left, address in zip(range(len(addresses), 0, -1), addresses, strict=True):
                    now, deadline = asyncio.get_running_loop().time(), limit.when()
                    share = None if deadline is None else (deadline - now) / left
                    try:
                        return await self.network.connect_tcp(address, port, share, local_address, socket_options)
                    except (httpcore2.ConnectError, httpcore2.ConnectTimeout):
                        if left == 1:
                            raise
        except TimeoutError:
            raise httpcore2.ConnectTimeout from None
        raise httpcore2.ConnectError("the name has no address")

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)

    async def _checked_addresses(self, host: str, port: int) -> Sequence[str]:
        loop = asyncio.get_running_loop()
        try:
            addresses = await loop.run_in_executor(self.threads, self.resolve, host, port)
        except (OSError, UnicodeError) as error:  # UnicodeError: a label that no name server can be asked for
            raise httpcore2.ConnectError(f"the name cannot be looked up: {error}") from None
        for address in addresses:
            check_address(address, allow_private=self.allow_private)
        return addresses


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    if isinstance(address, IPv6Address) and address not in GLOBAL_UNICAST:
        return False
    return address.is_global and not address.is_multicast and not any(address in network for network in NEVER)
