"""Build the file trees of our image and of the one in docs/operations.md, without Docker, and run Python in them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
import yaml

from settings import ROOT
from tests.compose import OURS, find_compose

PAGE: Final = (ROOT / "docs" / "operations.md").read_text()
SECTION: Final = PAGE.partition("## An image with your own handlers\n")[2].partition("\n## ")[0]
FILES: Final = dict(re.findall(r"^```\w+\n# ([\w./-]+)\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL))
VARIABLES: Final = dict(re.findall(r"^echo (\w+)=(\S+) >> \.env", SECTION, re.MULTILINE))
INSTRUCTION: Final = re.compile(r"^(FROM|COPY|ENV|WORKDIR) ([^\n]+)", re.MULTILINE)

# Loads what every program of the image loads, and prints what the image makes of the handlers.
PROGRAM: Final = """
import json, sys
import api.app, commands, celeryconfig, tasks.celery_tasks, tasks.worker, receipts.celery_tasks
from tasks.core.registry import handlers

found = handlers()["greeting.send"]
modules = [sys.modules[name].__file__ for name in ("api.app", "tasks", "models", found.function.__module__)]
print(json.dumps({"queue": found.queue, "queues": [queue.name for queue in celeryconfig.task_queues], "from": modules}))
"""


def test_the_image_of_the_page_loads_its_handlers_and_its_workers_consume_their_queue(tmp_path: Path) -> None:
    root, context = tmp_path / "root", tmp_path / "context"
    build((ROOT / "deploy" / "Dockerfile").read_text().rpartition("\nFROM ")[0], context=ROOT, root=root)
    for name, text in FILES.items():
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        (context / name).write_text(text)
    own = FILES["myapp/Dockerfile"]
    assert re.findall(r"^FROM (\S+)", own, re.MULTILINE) == [OURS["worker"]["image"]]
    variables = build(own, context=context / "myapp", root=root)

    home = {"PATH": os.environ["PATH"], "CELERIAC_HOME": str(tmp_path), "BROKER_URL": "redis://127.0.0.1:1/0"}
    done = subprocess.run(
        [sys.executable, "-B", "-c", PROGRAM],
        cwd=root / "app",
        env=home | variables | VARIABLES,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["queue"] in found["queues"]
    assert [name for name in found["from"] if not Path(name).is_relative_to(root / "app")] == []


@pytest.mark.guarantee
def test_compose_uses_the_image_of_the_page_for_every_program_that_imports_handlers(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(re.sub(r"=$", "=secret", (ROOT / ".env.example").read_text(), flags=re.MULTILINE))
    (tmp_path / "myapp").mkdir()
    shutil.copy(ROOT / "docker-compose.yml", tmp_path)
    (tmp_path / "docker-compose.override.yml").write_text(FILES["docker-compose.override.yml"])
    command = [*find_compose(), "config"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    services = yaml.safe_load(done.stdout)["services"]
    own = {name for name, service in services.items() if service["image"] == "myapp:local"}
    assert own == set(OURS) - {"migrate", "flower"}
    for name in own:
        assert services[name]["build"] == {"context": str(tmp_path / "myapp"), "dockerfile": "Dockerfile"}
        assert services[name]["command"] == OURS[name]["command"]


def build(dockerfile: str, *, context: Path, root: Path) -> dict[str, str]:
    """Copy what the COPY lines of a Dockerfile copy into the folder `root`. Return the variables of its ENV lines."""
    folder, variables = "/app", dict[str, str]()
    for instruction, rest in INSTRUCTION.findall(dockerfile):
        match instruction:
            case "WORKDIR":
                folder = rest
            case "ENV":
                variables |= dict(pair.split("=", 1) for pair in rest.split())
            case "COPY":
                *sources, target = (word for word in rest.split() if not word.startswith("--chown="))
                place = root / (Path(folder) / target).relative_to("/")
                for source in sources:
                    _copy(context / source, place)
    return variables


def _copy(source: Path, place: Path) -> None:
    place.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, place)
