"""Execute docs/handlers.md: its Python files form a project whose tests pass, its commands and its SQL submit tasks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from models.engine import engine
from settings import ROOT
from tests.servers import ServersOfTests
from tests.tasks.work import rows

PAGE: Final = (ROOT / "docs" / "handlers.md").read_text()
BLOCKS: Final = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
FILE: Final = re.compile(r"# ((?:myapp|tests)/\w+\.py)\n")

# The client of some service that the page imports and does not show.
CRM: Final = """
is_reachable = True
pushed = []


class NoSuchCustomer(Exception):
    pass


def fetch(name):
    if not is_reachable:
        raise ConnectionError("no answer")
    if name != "ada":
        raise NoSuchCustomer(name)
    return {"name": name, "orders": ["a", "b"]}


def push(order, key):
    pushed.append(order)


async def fetch_async(name):
    return fetch(name)
"""
# Tests of what the page says in words.
MORE_TESTS: Final = """
import asyncio

import pytest
from sqlalchemy import text

from tasks.core.registry import handlers
from tasks.testing import run


def test_every_handler_of_the_page_is_registered():
    ours = {name for name, one in handlers().items() if one.function.__module__ == "myapp.handlers"}
    assert ours == {
        "invoice.import", "invoice.bulk", "crm.sync", "crm.export", "invoice.remind", "stock.move", "invoice.settle",
        "invoice.report", "stock.count", "crm.refresh",
    }
    assert handlers()["crm.refresh"].is_async
    assert handlers()["invoice.report"].schedule.rule == "0 3 * * *"
    assert handlers()["stock.count"].schedule.rule == "every 300s"


def test_limits_are_declared_and_do_not_hold_in_tests(db):
    limits = handlers()["crm.export"].limits
    assert (limits.max_running, str(limits.rate), int(limits.rate.burst)) == (5, "100/m", 8)
    payload = {"order": "a", "tenant": "acme"}
    assert {run("crm.export", payload, db).status for _ in range(20)} == {"SUCCEEDED"}


def test_an_async_handler_runs_in_a_test(db):
    assert run("crm.refresh", {"customer": "ada"}, db).status == "SUCCEEDED"
    assert db.execute(text("SELECT customer FROM synced")).scalars().all() == ["ada"]
    failed = run("crm.refresh", {"customer": "unknown"}, db)
    assert (failed.status, type(failed.raised).__name__) == ("RETRYING", "NoSuchCustomer")


@pytest.mark.parametrize(("total", "status"), [(1, "SUCCEEDED"), (0, "DISCARDED"), (-1, "RETRYING")])
def test_outcomes(db, total, status):
    db.execute(text("INSERT INTO invoice VALUES (1, :total)"), {"total": total})
    ran = run("invoice.remind", {"number": 1}, db)
    assert (ran.status, ran.attempt_count) == (status, 0)


def test_a_permanent_failure_is_dead_at_once(db):
    assert run("invoice.remind", {"number": 1}, db).status == "DEAD"
    assert run("crm.sync", {"customer": "unknown"}, db).error_code == "permanent"


def test_results_and_signals_of_a_real_worker(stack):
    import tasks
    from myapp import results

    with stack.worker():
        assert results.import_now(77, 5) == {"imported": 77}
        with pytest.raises(RuntimeError, match="DEAD: permanent Permanent: there is no such invoice"):
            original = tasks.submit
            tasks.submit = lambda engine, _type, payload, **more: original(engine, "invoice.remind", payload, **more)
            try:
                results.import_now(78, 5)
            finally:
                tasks.submit = original
        imported = tasks.submit(stack.engine, "invoice.import", {"number": 80, "total": 1}).task_id
        assert asyncio.run(results.result_of(imported)) == {"imported": 80}
        dead = tasks.submit(stack.engine, "invoice.remind", {"number": 79}).task_id
        assert tasks.wait(dead, timeout=30).status == "DEAD"
    assert results.try_again(dead) == "QUEUED"
    assert tasks.cancel(dead) == "QUEUED"


def test_signals_are_received_in_the_process_that_runs_the_task(db):
    from myapp import signals

    run("invoice.import", {"number": 5, "total": 1}, db)
    run("invoice.remind", {"number": 6}, db)
    assert signals.succeeded == [("invoice.import", {"imported": 5})]
    assert signals.failed == [("invoice.remind", "Permanent")]


def test_a_real_worker(stack):
    import time

    from sqlalchemy.orm import Session

    from myapp.orders import import_all, move

    with Session(stack.engine) as session:
        import_all(session, [{"number": n, "total": n} for n in range(3)])
        session.commit()
    move(5, by=1)
    with stack.engine.connect() as connection:
        statement = "SELECT partition_key FROM celeriac.ingest_task WHERE type = 'stock.move'"
        assert connection.execute(text(statement)).scalars().all() == ["article 5"]
    with stack.worker(), stack.engine.connect() as connection:
        deadline = time.monotonic() + 20
        while connection.execute(text("SELECT count(*) FROM invoice")).scalar() < 3:
            assert time.monotonic() < deadline
            connection.rollback()
            time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the files of the page, with a client for its service and more tests."""
    folder = tmp_path_factory.mktemp("a user's project")
    for name in ("myapp", "tests"):
        (folder / name).mkdir()
    (folder / "myapp" / "__init__.py").touch()
    (folder / "myapp" / "crm.py").write_text(CRM)
    (folder / "tests" / "test_page.py").write_text(MORE_TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    for language, block in BLOCKS:
        if language == "python":
            first_line = FILE.match(block)
            assert first_line, f"The first line must name the file:\n{block}"
            with (folder / first_line[1]).open("a") as file:
                file.write(f"\n\n{block}")
    return folder


@pytest.fixture(scope="module")
def project_tests(project: Path) -> Iterator[subprocess.Popen[str]]:
    """Run the tests of the project with their own servers, in the background."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    environment = _environment(project) | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    with subprocess.Popen(
        command, cwd=project, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as running:
        yield running
        running.terminate()


def test_every_block_of_the_page_is_executed() -> None:
    assert {language for language, _ in BLOCKS} == {"python", "sh", "sql"}
    assert len(BLOCKS) > 10


def test_the_commands_and_the_sql_of_the_page_submit_tasks(
    project: Path, stack: ServersOfTests, project_tests: subprocess.Popen[str]
) -> None:
    scripts = [block for language, block in BLOCKS if language == "sh"]
    script = "set -e\n" + "\n".join(scripts).replace("./manage.py", f'"{sys.executable}" "{ROOT}/manage.py"')
    done = subprocess.run(
        ["bash", "-c", script], cwd=project, env=_environment(project), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with engine().begin() as connection:
        for language, block in BLOCKS:
            if language == "sql":
                connection.exec_driver_sql(block)
    assert rows("type, payload->>'number', idempotency_key") == [
        ("invoice.import", "17", "invoice 17"),
        ("invoice.bulk", "19", None),
        ("invoice.import", "18", "invoice 18"),
    ]


def test_the_project_of_the_page_passes_its_tests(project_tests: subprocess.Popen[str]) -> None:
    output, _ = project_tests.communicate(timeout=60)
    assert project_tests.returncode == 0, output
    assert re.search(r"^18 passed", output, re.MULTILINE), output


def _environment(project: Path) -> dict[str, str]:
    path = os.pathsep.join([str(project), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "INGEST_HANDLERS": "myapp.handlers", "PYTHONDONTWRITEBYTECODE": "1"}
