"""No host name, no spelling of an address and no change in DNS leads a webhook to a forbidden address."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from outbox.publishers import address_guard
from outbox.publishers.address_guard import ForbiddenAddress, check_address, look_up
from outbox.publishers.contract import DestinationDown, Refused, Sent
from tests.outbox.publishers.case import events
from tests.outbox.publishers.http_cases import Hooks, Receiver, receiving, resolving

PRIVATE = [
    *("127.0.0.1", "127.255.255.254", "::1"),  # loopback
    *("10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1"),
    *("100.64.0.1", "100.127.255.255", "100.100.100.200"),  # carrier NAT
    *("fc00::1", "fd00:ec2::254"),  # unique local
    *("::ffff:127.0.0.1", "::ffff:7f00:1", "::ffff:10.0.0.1", "64:ff9b::127.0.0.1", "64:ff9b::c0a8:101"),
]
NEVER = [
    *("0.0.0.0", "0.1.2.3", "::"),  # this network, unspecified
    *("169.254.169.254", "fe80::1", "fe80::1%1", "febf::1"),  # link-local
    *("224.0.0.1", "239.255.255.255", "ff02::1"),  # multicast
    *("240.0.0.1", "255.255.255.255", "192.0.0.192"),  # reserved, broadcast
    *("192.0.2.1", "198.51.100.1", "203.0.113.1", "2001:db8::1", "3fff::1", "198.18.0.1", "198.19.255.255"),
    *("2002:7f00:1::", "2002:808:808::1", "192.88.99.1"),  # 6to4
    *("2001::1", "2001:0:7f00:1::", "2001:2::1", "2001:10::1", "2001:1ff:ffff::1"),  # Teredo and its neighbours
    *("64:ff9b:1::7f00:1", "64:ff9b:1:ffff::a00:1"),  # local NAT64
    *("::127.0.0.1", "::ffff:0:127.0.0.1", "100::1", "fec0::1", "4000::1", "5f00::1"),  # outside global unicast
    *("::ffff:169.254.169.254", "64:ff9b::169.254.169.254", "64:ff9b::"),
    "168.63.129.16",
]
PUBLIC = [
    *("1.1.1.1", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255", "128.0.0.0"),
    *("169.253.255.255", "169.255.0.0", "172.15.255.255", "172.32.0.0", "192.167.255.255", "192.169.0.0"),
    *("198.17.255.255", "198.20.0.0", "223.255.255.255", "2001:200::1", "2606:4700::1111", "2a00:1450::1"),
    *("::ffff:1.1.1.1", "64:ff9b::1.1.1.1"),
]


@pytest.mark.parametrize("address", PRIVATE)
def test_a_private_address_is_forbidden_unless_allow_private_is_set(address: str) -> None:
    with pytest.raises(ForbiddenAddress, match=r"private.*allow_private=1"):
        check_address(address, allow_private=False)
    check_address(address, allow_private=True)


@pytest.mark.parametrize("address", NEVER)
@pytest.mark.parametrize("allow_private", [False, True])
def test_an_address_that_is_neither_public_nor_private_is_always_forbidden(address: str, allow_private: bool) -> None:
    with pytest.raises(ForbiddenAddress, match="not a public address"):
        check_address(address, allow_private=allow_private)


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_is_allowed(address: str) -> None:
    check_address(address, allow_private=False)


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.1", "0x7f.1", "0x7f000001", "2130706433", "127。0。0。1", "localhost", "LOCALHOST"),
        *("[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::1]", "0", "0.0.0.0", "[::]", "127.0.0.1.", "localhost."),
    ],
)
def test_no_spelling_of_a_loopback_address_is_allowed(hooks: Hooks, host: str) -> None:
    publisher = hooks.publisher(
        f"http://user:canary@{host}:{hooks.receiver.port}/canary",
        allow_private=False,
        resolve=lambda host, port: look_up(host.removesuffix("."), port),  # without a query to a real name server
    )
    for result in publisher.publish(events("one", "two")):
        assert isinstance(result, Refused)
        assert result.error.startswith("http://")
        assert f":{hooks.receiver.port} was not asked: " in result.error
        assert "canary" not in result.error
    assert hooks.receiver.connections == 0


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Receiver, Receiver]]:
    """Two receivers at one port: 127.0.0.2, which counts as public here, and 127.0.0.1, which is private."""

    def check(text: str, *, allow_private: bool) -> None:
        if text != "127.0.0.2":
            check_address(text, allow_private=allow_private)

    monkeypatch.setattr(address_guard, "check_address", check)
    with receiving("127.0.0.1") as private, receiving("127.0.0.2", private.port) as public:
        yield public, private


def test_a_name_that_changes_its_address_after_the_check_is_not_looked_up_again(
    hooks: Hooks, twins: tuple[Receiver, Receiver]
) -> None:
    public, private = twins
    url = f"http://rebinding.example:{public.port}/"
    publisher = hooks.publisher(url, allow_private=False, resolve=resolving(["127.0.0.2"], ["127.0.0.1"]))
    assert publisher.publish(events("one")) == [Sent()]  # a second look-up would have found the private address
    publisher.close()
    (result,) = publisher.publish(events("two"))
    assert isinstance(result, Refused)
    assert result.error == (
        f"http://rebinding.example:{public.port} was not asked: "
        "127.0.0.1 is a private address; if this is intended, allow it with allow_private=1."
    )
    assert (public.connections, private.connections) == (1, 0)


@pytest.mark.parametrize("addresses", [["127.0.0.2", "127.0.0.1"], ["127.0.0.1", "127.0.0.2"]])
def test_one_forbidden_address_among_several_forbids_the_name(
    hooks: Hooks, twins: tuple[Receiver, Receiver], addresses: list[str]
) -> None:
    public, private = twins
    url = f"http://mixed.example:{public.port}/"
    publisher = hooks.publisher(url, allow_private=False, resolve=resolving(addresses))
    assert [type(result) for result in publisher.publish(events("one"))] == [Refused]
    assert (public.connections, private.connections) == (0, 0)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a key and a self-signed certificate of hooks.example."""
    if not shutil.which("openssl"):
        pytest.skip("openssl is needed to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    names = ["-subj", "/CN=hooks.example", "-addext", "subjectAltName=DNS:hooks.example", "-days", "2"]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", "key.pem"]
    subprocess.run(
        ["openssl", "req", "-x509", *key, *names, "-out", "cert.pem"], cwd=folder, check=True, capture_output=True
    )
    both = folder / "both.pem"
    both.write_text((folder / "key.pem").read_text() + (folder / "cert.pem").read_text())
    return both


def test_tls_checks_the_host_name_although_the_connection_is_made_to_an_address(
    hooks: Hooks, certificate: Path
) -> None:
    asked_for: list[str | None] = []
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    tls.sni_callback = lambda _socket, name, _context: asked_for.append(name)
    trusting = ssl.create_default_context(cafile=certificate)
    with receiving(tls=tls) as receiver:
        for host, context, expected in [
            ("hooks.example", trusting, None),
            ("other.example", trusting, "certificate is not valid for 'other.example'"),
            ("hooks.example", None, "self-signed certificate"),
        ]:
            publisher = hooks.publisher(
                f"https://{host}:{receiver.port}/",
                allow_http=False,
                ssl_context=context,
                resolve=resolving(["127.0.0.1"]),
            )
            if expected is None:
                assert publisher.publish(events("one", "two")) == [Sent(), Sent()]
            else:
                with pytest.raises(DestinationDown, match=expected):
                    publisher.publish(events("lost"))
            publisher.close()
    assert set(asked_for) == {"hooks.example", "other.example"}
    assert [request.headers["Host"] for request in receiver.requests] == [f"hooks.example:{receiver.port}"] * 2
