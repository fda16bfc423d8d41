"""A RabbitMQ for the tests: one node per run, in a temporary folder, on loopback, with a vhost for whoever asks.

Debian's `rabbitmq-server` on the PATH wants to be root and changes to a user of its own; the script in the package's
folder runs as anybody. Erlang's name server (epmd) detaches itself: it has a port of its own here, inherits the mark of
the node, and is ended by that. With AMQP_URL set that server is used instead; we neither stop it nor make vhosts there.
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
VHOSTS: Final = 16  # made at the start, 20 ms each; `rabbitmqctl add_vhost` would cost a second
LARGEST_MESSAGE: Final = 1_000_000  # bytes; by default 128 MiB, or 16 MiB since 4.0
QUEUES: Final = ("ingest", "system", "ingest.dlq")


class OwnRabbit:
    """A node that we start and end."""

    def __init__(self, server: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="celeriac-rabbitmq-"))  # RabbitMQ cannot read the disk at a space
        self.password = secrets.token_urlsafe(16)
        ports = Home(self.folder).ports({"amqp": 0, "distribution": 0, "epmd": 0}, wished={})
        self.port = ports["amqp"]
        self._free = itertools.count()
        self._write_configuration()
        self.process = LocalProcess(
            [str(server)],
            folder=self.folder / "rabbitmq",
            cwd=self.folder,
            environment=environment(**self._variables(ports)),
            is_ready=self._is_ready,
        )

    def url(self) -> str:
        """The address of a vhost that nobody has used."""
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
            "HOME": str(self.folder),  # of its Erlang cookie
            "RABBITMQ_NODENAME": f"celeriac{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(ports["distribution"]),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            "RABBITMQ_MNESIA_BASE": str(self.folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(self.folder / "log"),
            "RABBITMQ_CONFIG_FILE": str(self.folder / "rabbitmq.conf"),
            "RABBITMQ_CONF_ENV_FILE": os.devnull,  # not the machine's
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "plugins"),
            "ERL_EPMD_PORT": str(ports["epmd"]),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
        }

    def _write_configuration(self) -> None:
        vhosts = [f"test-{number}" for number in range(VHOSTS)]
        everything = {"user": USER, "configure": ".*", "write": ".*", "read": ".*"}
        definitions = {
            "vhosts": [{"name": name} for name in vhosts],
            "users": [{"name": USER, "password": self.password, "tags": []}],
            "permissions": [{**everything, "vhost": name} for name in vhosts],
        }
        (self.folder / "definitions.json").write_text(json.dumps(definitions))
        (self.folder / "plugins").write_text("[].\n")
        (self.folder / "rabbitmq.conf").write_text(
            f"load_definitions = {self.folder / 'definitions.json'}\n"
            "log.console = true\nlog.console.level = error\nlog.file = false\ndisk_free_limit.absolute = 10MB\n"
            f"max_message_size = {LARGEST_MESSAGE}\n"
        )


class GivenRabbit:
    """The server of AMQP_URL, in the form of a process that runs for ever."""

    status = "running"
    name = id = "AMQP_URL"
    attrs: Final[dict[str, Any]] = {"NetworkSettings": {"Networks": {}, "Ports": {}}}

    def __init__(self, url: str) -> None:
        self._url = url
        self.process = self

    def url(self) -> str:
        """Always the same vhost, without what an earlier test left in our queues."""
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
        assert self.is_ready(), "no RabbitMQ answers at AMQP_URL"

    def reload(self) -> None:
        pass

    def logs(self) -> bytes:
        return b""

    def start(self) -> None:
        pass

    def restart(self, timeout: float = 10) -> None:  # noqa: ARG002 - the form of LocalProcess
        pytest.skip("RabbitMQ: the server of AMQP_URL is not ours to restart")


def launch() -> OwnRabbit | GivenRabbit | None:
    """Started but not awaited: it takes six seconds. None if there is none."""
    if url := os.environ.get("AMQP_URL"):
        return GivenRabbit(url)
    server = find_server()
    return OwnRabbit(server) if server else None


def find_server() -> Path | None:
    """The script that starts a node as whoever calls it; in its folder are the scripts that it reads."""
    on_path = shutil.which("rabbitmq-server")
    candidates = [Path("/usr/lib/rabbitmq/bin/rabbitmq-server"), *([Path(on_path).resolve()] if on_path else [])]
    return next((path for path in candidates if path.exists() and path.with_name("rabbitmq-env").exists()), None)


def answers(url: str) -> bool:
    with suppress(Exception), Connection(url, connect_timeout=2) as connection:  # kombu's transports raise many kinds
        connection.connect()
        return True
    return False
