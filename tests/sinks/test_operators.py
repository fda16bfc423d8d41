"""What an operator sees of sinks: guarantees, what an interrupted task has done, and which tasks may run again."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import Engine

import settings
from api.app import app
from api.tokens import Scope
from checks import sinks as check_sinks
from checks.result import Level
from sinks.configuration import open_sinks
from tasks.core.outcomes import Permanent
from tasks.core.task import Task
from tests.api.callers import Callers
from tests.servers import ServersOfTests
from tests.sinks.places import FilesPlace, KeyedPlace, Place, TwoPhasePlace
from tests.tasks.command_line import manage
from tests.tasks.deliveries import handled, scalar, submitted
from tests.tasks.lost_workers import killed, later, reclaim_lost
from tests.tasks.outside import TYPE, ran

NOWHERE = {"url": "postgresql://me:hunter2@127.0.0.1:1/none", "guarantee": "keyed"}


@pytest.fixture
def callers(stack: ServersOfTests) -> Iterator[Callers]:
    with TestClient(app, raise_server_exceptions=False) as client:
        yield Callers(client)


@pytest.fixture
def keyed(other: Engine, configure: Callable[..., None]) -> KeyedPlace:
    place = KeyedPlace(other)
    configure(place={**place.setting, "key_life_hours": 48})
    open_sinks().find("place").prepare()
    return place


@pytest.fixture
def two_phase(other: Engine, configure: Callable[..., None]) -> TwoPhasePlace:
    place = TwoPhasePlace(other)
    configure(place=place.setting)
    return place


def shown(id_: uuid.UUID) -> list[tuple[str, str | None]]:
    """Return state and detail of each effect, as `show` prints them."""
    effects = manage("show", id_, "--json").json["effects"]
    return [(effect["state"], effect["detail"]) for effect in effects]


def dies_after(write: Callable[[Task], Any]) -> uuid.UUID:
    def fail(task: Task) -> None:
        write(task)
        raise Permanent("no")

    return ran(fail)


@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("window", "state"),
    [
        ("keyed.before_effect", "not committed"),
        ("keyed.before_commit", "not committed"),
        ("keyed.after_commit", "committed"),
    ],
)
def test_show_says_what_a_killed_worker_has_done_in_a_keyed_sink(keyed: KeyedPlace, window: str, state: str) -> None:
    with handled(TYPE, keyed.write, transactional=False):
        (id_,) = submitted(1, TYPE)
        killed([id_], f"{window}=kill")
    assert shown(id_) == [(state, None)]


@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("window", "effect"),
    [
        ("sinks.before_handles", ("not committed", None)),
        ("sinks.after_handles", ("not committed", None)),
        ("two_phase.prepared", ("not committed", None)),
        ("sinks.after_prepare", ("not committed", None)),
        ("sinks.before_decision", ("not committed", None)),
        ("sinks.before_commit", ("committed", "pending: not visible yet")),
        ("sinks.after_commit", ("committed", "pending: not visible yet")),
    ],
)
def test_show_says_what_a_killed_worker_has_done_in_a_two_phase_sink(
    two_phase: TwoPhasePlace, window: str, effect: tuple[str, str | None], ledger: ServersOfTests
) -> None:
    with handled(TYPE, two_phase.write, transactional=False):
        (id_,) = submitted(1, TYPE)
        killed([id_], f"{window}=kill")
        assert shown(id_) == [effect]
        reclaim_lost(ledger)
        assert manage("recover", "--json").code == 0
    if effect[0] == "committed":
        assert shown(id_) == [("committed", "visible")]
    assert two_phase.left_behind() == []


NOTHING = ("not committed", None)
PENDING = ("committed", "pending: not visible yet")
# the sink, where its worker dies → what an operator reads before recovery, and in the end
IN_OTHER_SINKS = [
    *[("files", window, NOTHING, NOTHING) for window in FilesPlace.windows[:5]],
    *[("files", window, PENDING, ("committed", "visible")) for window in FilesPlace.windows[5:]],
    *[(name, "ingest.after_effect", NOTHING, NOTHING) for name in ("atomic", "outbox")],
    *[(name, "ingest.after_settle", ("committed", None), ("committed", None)) for name in ("atomic", "outbox")],
]


@pytest.mark.guarantee
@pytest.mark.parametrize(("place", "window", "effect", "in_the_end"), IN_OTHER_SINKS, indirect=["place"])
def test_show_says_what_a_killed_worker_has_done_in_any_other_sink(
    place: Place,
    window: str,
    effect: tuple[str, str | None],
    in_the_end: tuple[str, str | None],
    ledger: ServersOfTests,
) -> None:
    """For Redis lists and HTTP, see test_redis_list.py and test_http_sink.py."""
    with handled(TYPE, place.write, transactional=False):
        (id_,) = submitted(1, TYPE)
        killed([id_], f"{window}=kill")
        assert shown(id_) == [effect]
        reclaim_lost(ledger)
        assert manage("recover", "--json").code == 0
    assert shown(id_) == [in_the_end]
    assert place.left_behind() == []


def test_an_effect_is_unknown_while_its_sink_cannot_be_reached_and_known_again_afterwards(
    keyed: KeyedPlace, configure: Callable[..., None]
) -> None:
    id_ = dies_after(keyed.write)
    configure(place=NOWHERE)
    ((state, detail),) = shown(id_)
    assert (state, detail) == ("unknown", "PostgreSQL at 127.0.0.1:1 is unreachable: Connection refused.")
    configure(place=keyed.setting)
    assert shown(id_) == [("committed", None)]


def test_a_type_that_uses_no_sink_shows_no_effects(keyed: KeyedPlace) -> None:
    assert shown(ran(lambda _task: None)) == []
    assert "effect in the sink" in manage("show", dies_after(keyed.write)).out


def test_the_preview_of_a_requeue_counts_effects(keyed: KeyedPlace) -> None:
    for write in (keyed.write, keyed.write, lambda task: task.sink("place")):
        dies_after(write)
    done = manage("requeue-dead", "--type", TYPE, "--dry-run", "--json")
    assert done.json["effects"] == [{"sink": "place", "committed": 2, "notCommitted": 1, "unknown": 0}]
    assert "not committed" in manage("requeue-dead", "--type", TYPE, "--dry-run").out


@pytest.mark.guarantee
def test_a_task_that_is_older_than_the_key_life_of_its_sink_is_not_requeued_blindly(
    keyed: KeyedPlace, ledger: ServersOfTests
) -> None:
    old = dies_after(keyed.write)
    later(ledger, 49 * 3600)
    young = dies_after(keyed.write)
    done = manage("requeue-dead", "--type", TYPE, "--json")
    assert (done.code, done.json["done"], "1 task left unchanged" in done.err) == (0, 1, True)
    assert [scalar("SELECT status FROM ledger.ingest_task WHERE id = :id", id=id_) for id_ in (old, young)] == [
        "DEAD",
        "QUEUED",
    ]
    refused = manage("retry-now", old)
    assert (refused.code, "no longer remember its effects" in refused.err) == (1, True)
    assert manage("requeue-dead", "--id", old, "--accept-duplicates", "--json").json["done"] == 1


def test_requeuing_everything_still_asks_although_old_tasks_are_left_out(keyed: KeyedPlace) -> None:
    dies_after(keyed.write)
    assert manage("requeue-dead").code == 2


def test_sinks_are_listed_with_guarantee_conditions_and_health(
    keyed: KeyedPlace, configure: Callable[..., None]
) -> None:
    configure(place=keyed.setting, nowhere=NOWHERE, ledger={"url": "ledger:", "guarantee": "atomic"})
    done = manage("sinks", "--json")
    assert done.code == 1
    found = {each["name"]: each for each in done.json}
    assert {name: (each["guarantee"], each["ready"]) for name, each in found.items()} == {
        "place": ("keyed", True),
        "nowhere": ("keyed", False),
        "ledger": ("atomic", True),
    }
    assert "is unreachable" in found["nowhere"]["health"]
    assert "hunter2" not in done.out
    assert all(each["conditions"] for each in found.values())
    assert "the guarantee holds under these conditions" in manage("sinks").out


def test_a_keyed_sink_without_its_table_says_which_command_creates_it(
    other: Engine, configure: Callable[..., None]
) -> None:
    place = KeyedPlace(other)
    configure(place=place.setting)
    id_ = ran(place.write)
    assert "run `manage.py sinks prepare place`" in manage("show", id_).out
    assert manage("sinks", "prepare", "place").code == 0
    assert manage("sinks", "prepare", "place").code == 0
    assert manage("sinks").code == 0


def test_an_unknown_sink_is_named_and_so_are_the_known_ones(configure: Callable[..., None]) -> None:
    configure(billing={"url": "ledger:", "guarantee": "atomic"})
    id_ = ran(lambda task: task.sink("biling"))
    assert "There is no sink 'biling' in SINKS. Known: billing." in manage("show", id_).out
    assert manage("sinks", "prepare", "biling").code == 2


def test_check_warns_of_a_key_life_that_is_shorter_than_the_retries(
    other: Engine, configure: Callable[..., None]
) -> None:
    place = KeyedPlace(other)
    configure(place={**place.setting, "key_life_hours": 1})
    open_sinks().find("place").prepare()
    found = list(check_sinks.check(settings.current()))
    assert [finding.level for finding in found] == [Level.OK, Level.WARN]
    assert "key_life_hours" in found[1].remedy


def test_the_api_shows_effects_and_tells_addresses_to_operators_only(
    keyed: KeyedPlace, configure: Callable[..., None], callers: Callers
) -> None:
    id_ = dies_after(keyed.write)
    reader, operator = callers(Scope.TASKS_READ_ALL), callers(Scope.TASKS_READ_ALL, Scope.OPERATE, name="op")
    path = f"/api/tasks/{id_}/effects"
    assert [(effect["sink"], effect["state"]) for effect in reader.get(path).json()["effects"]] == [
        ("place", "committed")
    ]
    configure(place=NOWHERE)
    assert reader.get(path).json()["effects"][0]["detail"] is None
    assert "127.0.0.1" in operator.get(path).json()["effects"][0]["detail"]


def test_old_keys_are_deleted_after_their_life_and_no_others(keyed: KeyedPlace, other: Engine) -> None:
    first, second = ran(keyed.write), ran(keyed.write)
    with other.begin() as connection:
        connection.exec_driver_sql(
            f"UPDATE celeriac_sink.effect SET completed_at = now() - interval '49 h' WHERE task_id = '{first}'"
        )
    assert open_sinks().find("place").prune(open_sinks().installation()) == 1
    assert [shown(first), shown(second)] == [[("not committed", None)], [("committed", None)]]
