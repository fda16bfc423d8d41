"""Drills on a running stack: a part is taken away and comes back, and nothing is lost or charged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

import settings
from chaos.drill import DESTINATION, EVENTS, Drilled, NoStack, Part, drill
from embedded.home import Home
from embedded.temporary_servers import environment
from tests.stack_user import User

pytestmark = pytest.mark.timeout(180)
OWN = {"name": DESTINATION}
LEASED = """
    UPDATE tick SET lease_token = gen_random_uuid(), lease_until = ledger_now() + interval '5 s' WHERE name = 'relay'
"""


def drilled(user: User, part: str) -> Any:
    said = user.manage("drill", part, "--seconds", "2", "--yes", "--json")
    return json.JSONDecoder().raw_decode(said)[0]  # warnings about the outage follow, on stderr


@pytest.mark.parametrize("part", ["postgres", pytest.param("broker", marks=pytest.mark.slow)])
def test_no_task_is_lost_or_charged_while_a_server_is_away(running: User, part: str) -> None:
    found = drilled(running, part)
    assert (found["isRight"], found["done"], found["charged"]) == (True, found["given"], 0)
    assert found["waited"] >= {"postgres": 1, "broker": 20}[part]


def test_no_event_is_lost_or_repeated_while_a_destination_is_away_and_none_is_left(running: User) -> None:
    engine = create_engine(running.addresses()["DATABASE_URL"].replace("postgresql:", "postgresql+psycopg2:", 1))
    with engine.begin() as connection:  # as a killed drill, and a relay that PostgreSQL has cut off, leave it
        connection.execute(text("INSERT INTO outbox_event (destination, payload) VALUES (:name, '{}')"), OWN)
        connection.execute(text(LEASED))
    found = drilled(running, "destination")
    with engine.connect() as connection:
        left = connection.execute(text("SELECT count(*) FROM outbox_event WHERE destination = :name"), OWN).scalar()
    engine.dispose()
    assert (found["isRight"], found["given"], found["done"], found["waited"]) == (True, EVENTS + 1, EVENTS + 1, EVENTS)
    assert (found["duplicates"], found["probed"] >= 1, left) == (0, True, 0)


def test_the_result_of_a_drill_is_said_in_sentences() -> None:
    tasks = Drilled(Part.POSTGRES, 5.0, given=20, waited=19, done=20, charged=0, recovered_seconds=2.94)
    assert tasks.sentences() == (
        "20 of 20 tasks have succeeded; 19 of them had waited in the ledger. Tasks with a counted failure: 0.\n"
        "Everything was done 2.9 s after PostgreSQL came back."
    )
    events = Drilled(Part.DESTINATION, 5.0, 11, 10, 11, charged=0, recovered_seconds=2.5, probed=3, duplicates=1)
    assert events.sentences() == (
        "11 of 11 events were sent; 10 of them had waited in the outbox. Sent twice: 1. A failed probe counts as an "
        "attempt of: 3.\nEverything was done 2.5 s after the destination came back."
    )


def test_a_drill_needs_consent(running: User) -> None:
    assert "Nothing was changed" in running.manage("drill", "broker", code=2)
    assert "'redis' is not one of" in running.manage("drill", "redis", "--yes", code=2)


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
