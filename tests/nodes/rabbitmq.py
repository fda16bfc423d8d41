"""A RabbitMQ for the tests: one node per run, in a temporary folder, on loopback, with several virtual hosts.

Debian's `rabbitmq-server` on the PATH must be run by root and changes to its own user; the script in the package's
folder runs as any user. Erlang's name server (epmd) detaches itself; it gets a port of its own, and is found by the
environment that it inherits. With AMQP_URL set, that server is used instead; we neither stop it nor add virtual hosts.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest
from kombu import Connection, Queue

from embedded.home import Home
from tests.nodes.process import LocalProcess
from tests.nodes.programs import environment

MISSING: Final = "RabbitMQ: no rabbitmq-server is installed and AMQP_URL is not set"
USER: Final = "celeriac"
VHOSTS: Final = 16  # created at the start, 20 ms each; `rabbitmqctl add_vhost` takes a second
LARGEST_MESSAGE: Final = 1_000_000  # in bytes; the default is 128 MiB, since 4.0 16 MiB
QUEUES: Final = ("ingest", "system", "receipts", "ingest.dlq")


class OwnRabbit:
    """A RabbitMQ node that we start and end. `advanced`: the contents of its advanced.config, in Erlang."""

    def __init__(self, server: Path, *, advanced: str = "[].") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="celeriac-rabbitmq-"))  # RabbitMQ cannot handle a path with a space
        self.password = secrets.token_urlsafe(16)
        ports = Home(self.folder).ports(dict.fromkeys(("amqp", "management", "distribution", "epmd"), 0), wished={})
        self.port, self.management_port = ports["amqp"], ports["management"]
        self._free = itertools.count()
        self._write_configuration(advanced)
        self.process = LocalProcess(
            [str(server)],
            folder=self.folder / "rabbitmq",
            cwd=self.folder,
            environment=environment(**self._variables(ports)),
            is_ready=self._is_ready,
        )

    def url(self) -> str:
        """Return the address of an unused virtual host."""
        number = next(self._free)
        assert number < VHOSTS, f"the tests use more than {VHOSTS} vhosts: raise VHOSTS"
        return self._url(number)

    def end(self) -> None:
        self.process.end()
        shutil.rmtree(self.folder)

    def _url(self, number: int) -> str:
        return f"amqp://{USER}:{self.password}@127.0.0.1:{self.port}/test-{number}"

    def _is_ready(self) -> bool:
        return answers(self._url(VHOSTS - 1))

    def _variables(self, ports: dict[str, int]) -> dict[str, str]:
        return {
            "HOME": str(self.folder),  # for its Erlang cookie
            "RABBITMQ_NODENAME": f"celeriac{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(ports["distribution"]),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            "RABBITMQ_MNESIA_BASE": str(self.folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(self.folder / "log"),
            "RABBITMQ_CONFIG_FILE": str(self.folder / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(self.folder / "advanced.config"),
            "RABBITMQ_CONF_ENV_FILE": os.devnull,  # ignore the configuration of this machine
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "plugins"),
            "ERL_EPMD_PORT": str(ports["epmd"]),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
        }

    def _write_configuration(self, advanced: str) -> None:
        vhosts = [f"test-{number}" for number in range(VHOSTS)]
        everything = {"user": USER, "configure": ".*", "write": ".*", "read": ".*"}
        definitions = {
            "vhosts": [{"name": name} for name in vhosts],
            "users": [{"name": USER, "password": self.password, "tags": ["management"]}],
            "permissions": [{**everything, "vhost": name} for name in vhosts],
        }
        (self.folder / "definitions.json").write_text(json.dumps(definitions))
        (self.folder / "plugins").write_text("[rabbitmq_management].\n")
        (self.folder / "advanced.config").write_text(f"{advanced}\n")
        (self.folder / "rabbitmq.conf").write_text(
            f"load_definitions = {self.folder / 'definitions.json'}\n"
            "log.console = true\nlog.console.level = error\nlog.file = false\ndisk_free_limit.absolute = 10MB\n"
            f"max_message_size = {LARGEST_MESSAGE}\n"
            f"management.tcp.ip = 127.0.0.1\nmanagement.tcp.port = {self.management_port}\n"
        )


class GivenRabbit:
    """The server of AMQP_URL, with the interface of a process that always runs."""

    status = "running"
    management_port: int | None = None  # unknown
    name = id = "AMQP_URL"
    attrs: Final[dict[str, Any]] = {"NetworkSettings": {"Networks": {}, "Ports": {}}}

    def __init__(self, url: str) -> None:
        self._url = url
        self.process = self

    def url(self) -> str:
        """Delete the queues of earlier tests and return the one virtual host."""
        with Connection(self._url) as connection:
            for name in QUEUES:
                with connection.channel() as channel:
                    Queue(name, channel=channel).delete()
        return self._url

    def end(self) -> None:
        pass

    def is_ready(self) -> bool:
        return answers(self._url)

    def await_ready(self, _seconds: float = 30) -> None:
        assert self.is_ready(), "the RabbitMQ at AMQP_URL does not answer"

    def reload(self) -> None:
        pass

    def logs(self) -> bytes:
        return b""

    def start(self) -> None:
        pass

    def restart(self, timeout: float = 10) -> None:  # noqa: ARG002 - the interface of LocalProcess
        pytest.skip("RabbitMQ: tests do not restart the server of AMQP_URL")


def launch() -> OwnRabbit | GivenRabbit | None:
    """Start a node without waiting for it, which would take six seconds. Return None if RabbitMQ is not installed."""
    if url := os.environ.get("AMQP_URL"):
        return GivenRabbit(url)
    server = find_server()
    return OwnRabbit(server) if server else None


def find_server() -> Path | None:
    """Return the script that starts a node as the calling user. It needs the other scripts of its folder."""
    on_path = shutil.which("rabbitmq-server")
    candidates = [Path("/usr/lib/rabbitmq/bin/rabbitmq-server"), *([Path(on_path).resolve()] if on_path else [])]
    return next((path for path in candidates if path.exists() and path.with_name("rabbitmq-env").exists()), None)


def answers(url: str) -> bool:
    with suppress(Exception), Connection(url, connect_timeout=2) as connection:  # transports raise many errors
        connection.connect()
        return True
    return False
