"""The programs of a stack in starting order: the servers that are not configured, then the programs of Celeriac."""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from embedded.addresses import API, FLOWER, KAFKA, RECEIPTS_METRICS, SYSTEM_METRICS, WORKER_METRICS
from embedded.home import Home
from embedded.postgres import Postgres
from embedded.program import Program
from embedded.redis import BROKER, RECEIPTS, Redis
from embedded.roles import PORTS
from embedded.worker_command import celery_command, quiet_start, worker_command
from home_files import HOST
from settings import SERVER_VARIABLES, Settings


@dataclass(frozen=True, slots=True)
class Stack:
    """The programs to start, and their addresses."""

    servers: list[Program]
    programs: list[Program]
    addresses: dict[str, str]


def plan(home: Home, settings: Settings, *, verbose: bool = False) -> Stack:
    """Choose ports and addresses without starting anything."""
    given = {variable: url for variable in SERVER_VARIABLES if (url := settings.given(variable))}
    wished = {"api": settings.api_port} if "api_port" in settings.model_fields_set else {}
    ports = home.ports(PORTS, wished=wished)
    servers, addresses = embedded_servers(home, ports, without=given)
    addresses |= given
    addresses[API] = f"http://{settings.api_host}:{ports['api']}"
    addresses[FLOWER] = f"http://{HOST}:{ports['flower']}"
    if port := settings.worker_metrics_port:
        for number, name in enumerate((WORKER_METRICS, SYSTEM_METRICS, RECEIPTS_METRICS)):
            addresses[name] = f"http://{settings.metrics_host}:{port + number}/metrics"
    if settings.ingest_queue == "kafka":
        addresses[KAFKA] = settings.kafka_bootstrap_servers
    return Stack(servers, list(_programs(settings, home, ports, addresses, verbose)), addresses)


def embedded_servers(
    home: Home, ports: dict[str, int], *, without: Iterable[str] = (), configuration: Mapping[str, str] | None = None
) -> tuple[list[Program], dict[str, str]]:
    """Return the embedded servers, except those of the variables in `without`, and their addresses by variable."""
    postgres = Postgres(home, ports["postgres"], configuration=configuration or {})
    broker = Redis(home, "redis-broker", ports["redis-broker"], BROKER)
    receipts = Redis(home, "redis-receipts", ports["redis-receipts"], RECEIPTS)
    servers, addresses = [], {}
    if "DATABASE_URL" not in without:
        servers.append(
            Program(
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
            servers.append(Program(server.role, server.command, prepare=server.prepare, is_ready=server.is_ready))
            addresses[variable] = server.url
    return servers, addresses


def _programs(
    settings: Settings, home: Home, ports: dict[str, int], addresses: dict[str, str], verbose: bool
) -> Iterable[Program]:
    level = "info" if verbose else "warning"
    shared = {"CELERIAC_HOME": str(home.path), "PYTHONUNBUFFERED": "1", "REMAP_SIGTERM": "SIGQUIT"}
    shared |= {variable: settings.given(variable) for variable in SERVER_VARIABLES}
    if os.geteuid() == 0:  # a container may well run as root, and Celery would warn at each start
        shared["PYTHONWARNINGS"] = "ignore:You're running the worker with superuser privileges"
    python = [sys.executable, "-m"]
    celery, quiet = celery_command(settings, level), quiet_start(level)
    ticks, streams = settings.broker_queue("system"), settings.broker_queue("receipts")
    yield Program("worker", worker_command(settings, processes=2, level=level), shared)
    port = settings.worker_metrics_port
    system = shared | ({"WORKER_METRICS_PORT": str(port + 1)} if port else {})
    yield Program("system", [*celery, "worker", "-n", "system@%h", "-Q", ticks, "-c", "1", *quiet], system)
    consumers = shared | ({"WORKER_METRICS_PORT": str(port + 2)} if port else {})
    processes = str(2 * settings.receipt_shards)  # savers and deliverers
    receipts = [*celery, "worker", "-n", "receipts@%h", "-Q", streams, "-c", processes, *quiet]
    yield Program("receipts", receipts, consumers)
    yield Program(
        "api",
        [
            *python,
            "uvicorn",
            "api.app:app",
            "--http=api.http_protocol:GuardedProtocol",
            "--ws=api.websocket_protocol:GuardedWebSocket",
            "--ws-max-size=1048576",
            "--ws-ping-interval=20",
            "--ws-ping-timeout=20",
            "--ws-per-message-deflate=false",  # it would cost each connection memory; signatures do not shrink
            f"--host={settings.api_host}",
            f"--port={ports['api']}",
            f"--log-level={level}",
        ],
        shared | {"API_PORT": str(ports["api"])},
        is_ready=lambda: _answers(addresses[API] + "/healthz"),
    )
    yield Program(
        "flower",
        [*celery, "flower", f"--port={ports['flower']}", f"--logging={'info' if verbose else 'error'}"],
        shared,  # at a lower level Flower warns about every worker that is still starting
        is_ready=lambda: _answers(addresses[FLOWER] + "/healthcheck"),
    )
    yield Program("beat", [*celery, "beat", "-l", level], shared)


_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy cannot reach our loopback address


def _answers(url: str) -> bool:
    try:
        with _direct.open(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
