"""What a stack consists of: the servers that nobody else provides, then the parts of Celeriac, in starting order."""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from embedded.home import Home
from embedded.part import Part
from embedded.postgres import Postgres
from embedded.redis import BROKER, RECEIPTS, Redis
from embedded.roles import PORTS
from settings import SERVER_VARIABLES, Settings


@dataclass(frozen=True, slots=True)
class Stack:
    """The parts to start and where they will be."""

    servers: list[Part]
    parts: list[Part]
    addresses: dict[str, str]


def plan(home: Home, settings: Settings, *, verbose: bool = False) -> Stack:
    """Choose ports and addresses; nothing is started."""
    given = {variable: url for variable in SERVER_VARIABLES if (url := settings.given(variable))}
    wished = {"api": settings.api_port} if "api_port" in settings.model_fields_set else {}
    ports = home.ports(PORTS, wished=wished)
    servers, addresses = embedded_servers(home, ports, without=given)
    addresses |= given
    addresses["API_URL"] = f"http://{settings.api_host}:{ports['api']}"
    addresses["FLOWER_URL"] = f"http://127.0.0.1:{ports['flower']}"
    return Stack(servers, list(_parts(settings, home, ports, addresses, verbose)), addresses)


def embedded_servers(
    home: Home, ports: dict[str, int], *, without: Iterable[str] = (), configuration: Mapping[str, str] | None = None
) -> tuple[list[Part], dict[str, str]]:
    """The servers that are not given, as parts, and their addresses by variable."""
    postgres = Postgres(home, ports["postgres"], configuration=configuration or {})
    broker = Redis(home, "redis-broker", ports["redis-broker"], BROKER)
    receipts = Redis(home, "redis-receipts", ports["redis-receipts"], RECEIPTS)
    parts, addresses = [], {}
    if "DATABASE_URL" not in without:
        parts.append(
            Part(
                postgres.role,
                postgres.command,
                prepare=postgres.prepare,
                is_ready=postgres.is_ready,
                finish=postgres.create_database,
                popen_options=postgres.popen_options,
            )
        )
        addresses["DATABASE_URL"] = postgres.url()
    for variable, server in (("BROKER_URL", broker), ("REDIS_URL", receipts)):
        if variable not in without:
            parts.append(Part(server.role, server.command, prepare=server.prepare, is_ready=server.is_ready))
            addresses[variable] = server.url
    return parts, addresses


def _parts(
    settings: Settings, home: Home, ports: dict[str, int], addresses: dict[str, str], verbose: bool
) -> Iterable[Part]:
    level = "INFO" if verbose else "WARNING"
    shared = {"CELERIAC_HOME": str(home.path), "PYTHONUNBUFFERED": "1", "REMAP_SIGTERM": "SIGQUIT"}
    shared |= {variable: settings.given(variable) for variable in SERVER_VARIABLES}
    if os.geteuid() == 0:  # Celery warns at each start; a machine of its own (a container) may well be run as root
        shared["PYTHONWARNINGS"] = "ignore:You're running the worker with superuser privileges"
    python = [sys.executable, "-m"]
    celery = [*python, "celery", *([] if verbose else ["-q"]), "-A", "tasks"]  # -q: no banner
    quiet_start = ["--without-gossip", "--without-mingle", "-l", level]
    queues = ",".join(settings.ingest_queues)
    yield Part("worker", [*celery, "worker", "-n", "ingest@%h", "-Q", queues, "-c", "2", *quiet_start], shared)
    system = shared | ({"WORKER_METRICS_PORT": str(port + 1)} if (port := settings.worker_metrics_port) else {})
    yield Part("system", [*celery, "worker", "-n", "system@%h", "-Q", "system", "-c", "1", *quiet_start], system)
    yield Part(
        "api",
        [
            *python,
            "uvicorn",
            "api.app:app",
            f"--host={settings.api_host}",
            f"--port={ports['api']}",
            f"--log-level={level.lower()}",
        ],
        shared | {"API_PORT": str(ports["api"])},
        is_ready=lambda: _answers(addresses["API_URL"] + "/healthz"),
    )
    yield Part(
        "flower",
        [*celery, "flower", f"--port={ports['flower']}", f"--logging={'info' if verbose else 'error'}"],
        shared,  # Flower warns of every worker that is not there yet
        is_ready=lambda: _answers(addresses["FLOWER_URL"] + "/healthcheck"),
    )
    yield Part("beat", [*celery, "beat", "-l", level], shared)


_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy cannot reach our loopback


def _answers(url: str) -> bool:
    try:
        with _direct.open(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
