"""Flower shows the arguments of every task, so it must ask for a login wherever it is started."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

from settings import ROOT
from tests.nodes.process import LocalProcess
from tests.nodes.programs import environment
from tests.nodes.shared import SharedNodes
from tests.servers import ServersOfTests
from tests.tasks.web import get


def test_flower_started_in_another_folder_listens_on_loopback_and_asks_for_the_generated_login(
    nodes: SharedNodes, stack: ServersOfTests, tmp_path: Path
) -> None:
    port = stack.home.ports({"flower": 0}, wished={})["flower"]
    flower = LocalProcess(
        [sys.executable, "-m", "celery", "-A", "tasks", "flower", f"--port={port}"],
        folder=tmp_path / "flower",
        cwd=tmp_path,
        environment=environment(PYTHONPATH=str(ROOT), BROKER_URL=nodes.redis().url),
        is_ready=lambda: get(port, "/healthcheck")[0] == 200,
    )
    try:
        flower.await_ready()
        sockets = psutil.Process(flower.pid).net_connections("inet")
        listening = [(socket.laddr.ip, socket.laddr.port) for socket in sockets if socket.status == psutil.CONN_LISTEN]
        assert listening == [("127.0.0.1", port)]
        assert get(port, "/")[0] == 401
        assert get(port, "/api/workers", login="celeriac:wrong")[0] == 401
        assert get(port, "/", login=f"celeriac:{stack.home.secrets['flower']}")[0] == 200
    finally:
        flower.end()
