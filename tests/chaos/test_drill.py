"""Drills on a running stack: a part is taken away and comes back, and nothing is lost or charged."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

import settings
from chaos.drill import DESTINATION, EVENTS, NoStack, Part, drill
from embedded.home import Home
from embedded.temporary_servers import environment
from tests.test_up_and_down import User

pytestmark = pytest.mark.timeout(180)
OWN = {"name": DESTINATION}


@pytest.fixture(scope="module")
def user() -> Iterator[User]:
    """A user whose stack is running."""
    folder = Path(tempfile.mkdtemp(prefix="celeriac drill "))
    made = User(folder / "home")
    made.manage("up", "-d")
    yield made
    made.manage("down")
    shutil.rmtree(folder)


def drilled(user: User, part: str) -> Any:
    said = user.manage("drill", part, "--seconds", "2", "--yes", "--json")
    return json.JSONDecoder().raw_decode(said)[0]  # warnings about the outage follow, on stderr


@pytest.mark.parametrize("part", ["postgres", pytest.param("broker", marks=pytest.mark.slow)])
def test_no_task_is_lost_or_charged_while_a_server_is_away(user: User, part: str) -> None:
    found = drilled(user, part)
    assert (found["isRight"], found["done"], found["charged"]) == (True, found["given"], 0)
    assert found["waited"] >= {"postgres": 1, "broker": 20}[part]


def test_no_event_is_lost_or_repeated_while_a_destination_is_away_and_none_is_left(user: User) -> None:
    engine = create_engine(user.addresses()["DATABASE_URL"].replace("postgresql:", "postgresql+psycopg2:", 1))
    with engine.begin() as connection:  # as a killed drill leaves it
        connection.execute(text("INSERT INTO outbox_event (destination, payload) VALUES (:name, '{}')"), OWN)
    found = drilled(user, "destination")
    with engine.connect() as connection:
        left = connection.execute(text("SELECT count(*) FROM outbox_event WHERE destination = :name"), OWN).scalar()
    engine.dispose()
    assert (found["isRight"], found["given"], found["done"], found["waited"]) == (True, EVENTS + 1, EVENTS + 1, EVENTS)
    assert (found["duplicates"], found["probed"] >= 1, left) == (0, True, 0)


def test_a_drill_needs_consent(user: User) -> None:
    assert "Nothing was changed" in user.manage("drill", "broker", code=2)
    assert "'redis' is not one of" in user.manage("drill", "redis", "--yes", code=2)


@pytest.mark.parametrize("part", Part)
@pytest.mark.parametrize(
    ("variable", "address"),
    [
        ("DATABASE_URL", "postgresql://celeriac@127.0.0.1:1/production"),
        ("BROKER_URL", "redis://127.0.0.1:1/0"),
    ],
)
def test_no_drill_runs_beside_servers_that_a_variable_names(
    part: Part, variable: str, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path / "home")
    home.create()
    home.write_stack(dict.fromkeys(settings.SERVER_VARIABLES, "redis://127.0.0.1:1/0"))
    for name in settings.SERVER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with environment({"CELERIAC_HOME": str(home.path), variable: address}), pytest.raises(NoStack, match=variable):
        drill(part, seconds=1, say=lambda _: None)


def test_a_hold_expires_by_itself(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.create()
    home.hold("broker", 60)
    assert home.is_held("broker")
    home.hold("broker", -1)
    assert not home.is_held("broker")
