"""docs/api.md is true: every route with its scopes, every example, every code."""

from __future__ import annotations

import re

from fastapi.testclient import TestClient

from api.authorization import OPEN, needed
from api.tokens import Scope
from models.errors import CeleriacError
from settings import NotConfigured, SettingsError
from tests.api.callers import make_token
from tests.api.examples import PAGE, examples
from tests.api.test_authorization import ROUTES


def test_every_route_and_its_scopes_are_on_the_page() -> None:
    rows = re.findall(r"^\| `([A-Z]+) (\S+)` \| (.+?) \|", PAGE, re.MULTILINE)
    told = {(method, path): set(re.findall(r"`(.+?)`", scopes)) for method, path, scopes in rows}
    assert told == {(method, path): {str(each) for each in needed(route)} for method, path, route in ROUTES}
    assert {path for (_, path), scopes in told.items() if not scopes} == OPEN
    assert set().union(*told.values()) == set(Scope)


def test_every_example_is_of_a_route() -> None:
    routes = {(method, path) for method, path, _ in ROUTES}
    shown = {(each.method, each.path.replace("$TASK", "{task_id}")) for each in examples()}
    assert shown <= routes
    assert {path for _, path in shown} == {path for _, path in routes} - OPEN


def test_the_first_examples_work_as_they_stand(client: TestClient) -> None:
    variables = {"TOKEN": make_token("ci", "tasks:submit", "tasks:read")}
    submit, show, history = examples()[:3]
    made = client.post(**submit.options(**variables))
    assert made.status_code == 202
    variables["TASK"] = made.json()["taskId"]
    assert client.get(**show.options(**variables)).json()["payload"] == {"fail": 1}
    assert len(client.get(**history.options(**variables)).json()["transitions"]) == 1
    assert client.post(**submit.options(**variables)).status_code == 200


def test_every_code_on_the_page_is_one_of_ours_with_its_status() -> None:
    rows = re.findall(r"^\| ([\d, ]+) \| (.+?) \|$", PAGE, re.MULTILINE)
    told = {code: statuses.split(", ") for statuses, codes in rows for code in re.findall(r"`([a-z_]+)`", codes)}
    ours = {each.code: each.http_status for each in _below(CeleriacError)}
    ours |= {each.code: each.http_status for each in (SettingsError, NotConfigured)}
    of_starlette = {"not_found": 404, "method_not_allowed": 405}
    assert len(rows) == 7
    for code, statuses in told.items():
        assert str((ours | of_starlette).get(code)) in statuses, code


def _below(kind: type[CeleriacError]) -> list[type[CeleriacError]]:
    return [kind, *(each for direct in kind.__subclasses__() for each in _below(direct))]
