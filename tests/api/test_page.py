"""docs/api.md agrees with the code: routes and scopes, examples, error codes."""

from __future__ import annotations

import re

from fastapi.testclient import TestClient

from api.authorization import OPEN_PATHS, scopes_of
from api.tokens import Scope
from models.errors import CeleriacError
from settings import NotConfigured, SettingsError
from tests.api.callers import make_token
from tests.api.examples import PAGE, examples
from tests.api.routes import ROUTES


def test_every_route_and_its_scopes_are_on_the_page() -> None:
    rows = re.findall(r"^\| `([A-Z]+) (\S+)` \| (.+?) \|", PAGE, re.MULTILINE)
    documented = {(method, path): set(re.findall(r"`(.+?)`", scopes)) for method, path, scopes in rows}
    routes = [(method, path, route) for method, path, route in ROUTES if not path.startswith("/docs/")]
    assert documented == {(method, path): {str(each) for each in scopes_of(route)} for method, path, route in routes}
    assert {path for (_, path), scopes in documented.items() if not scopes} <= OPEN_PATHS
    assert (
        set(re.findall(r"^\| `([a-z:-]+)` \| to ", PAGE, re.MULTILINE))
        == set(Scope)
        >= set().union(*documented.values())
    )


def test_every_route_but_the_probes_has_an_example() -> None:
    routes = {(method, path) for method, path, _ in ROUTES}
    shown = {
        (
            each.method,
            each.path.replace("$TASK", "{task_id}").replace("$RECEIPT", "{receipt_id}").replace("$QUEUE", "{queue}"),
        )
        for each in examples()
    }
    assert shown <= routes
    assert shown == {(method, path) for method, path in routes if path not in OPEN_PATHS}


def test_the_first_examples_work(client: TestClient) -> None:
    variables = {"TOKEN": make_token("ci", "tasks:submit", "tasks:read")}
    submit, show, history = examples()[:3]
    made = client.post(**submit.options(**variables))
    assert made.status_code == 202
    variables["TASK"] = made.json()["taskId"]
    assert client.get(**show.options(**variables)).json()["payload"] == {"fail": 1}
    assert len(client.get(**history.options(**variables)).json()["transitions"]) == 1
    assert client.post(**submit.options(**variables)).status_code == 200


def test_the_examples_for_operators_work(client: TestClient) -> None:
    token = make_token("ops", "operate")
    shown = [each for each in examples() if each.path.startswith("/internal/tasks")]
    assert len(shown) == 4
    for each in shown:
        answer = client.request(each.method, **each.options(TOKEN=token))
        assert answer.status_code == 200, answer.text


def test_every_error_code_on_the_page_exists_and_has_the_stated_status() -> None:
    rows = re.findall(r"^\| ([\d, ]+) \| (.+?) \|$", PAGE, re.MULTILINE)
    documented = {code: statuses.split(", ") for statuses, codes in rows for code in re.findall(r"`([a-z_]+)`", codes)}
    ours = {each.code: each.http_status for each in _below(CeleriacError)}
    ours |= {each.code: each.http_status for each in (SettingsError, NotConfigured)}
    assert len(rows) == 9
    for code, statuses in documented.items():
        assert str(ours.get(code)) in statuses, code


def _below(kind: type[CeleriacError]) -> list[type[CeleriacError]]:
    return [kind, *(each for direct in kind.__subclasses__() for each in _below(direct))]
