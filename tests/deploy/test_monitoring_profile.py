"""The profile `monitoring` of docker-compose.yml fits the files of deploy/ and the ports that our programs serve."""

from __future__ import annotations

import re
from typing import Any, Final

import yaml

from settings import ROOT
from tests.compose import MONITORING, OURS, SERVICES
from tests.deploy.monitoring import CONFIGURATION, DASHBOARD

JOBS: Final = {job["job_name"]: job for job in CONFIGURATION["scrape_configs"]}
PROVISIONING: Final = ROOT / "deploy" / "grafana" / "provisioning"


def test_only_the_profile_starts_prometheus_alertmanager_and_grafana() -> None:
    assert set(MONITORING) == {"prometheus", "alertmanager", "grafana"}
    for name, service in MONITORING.items():
        assert service["profiles"] == ["monitoring"]
        assert service["networks"] == ["default"], "it needs no way to the databases"
        assert "depends_on" not in service, f"{name} would start services without the profile"


def test_configuration_is_mounted_read_only_and_exists() -> None:
    for name, service in MONITORING.items():
        mounts = [mount.split(":") for mount in service["volumes"]]
        for source, _target, *mode in (mount for mount in mounts if mount[0].startswith("./")):
            assert (ROOT / source).is_dir(), source
            assert mode == ["ro"], source
        (data,) = (mount for mount in mounts if not mount[0].startswith("./"))
        assert data[0] == name


def test_the_programs_read_the_mounted_files() -> None:
    for name, option in (("prometheus", "--config.file="), ("alertmanager", "--config.file=")):
        (path,) = (word.removeprefix(option) for word in SERVICES[name]["command"] if word.startswith(option))
        assert _on_host(SERVICES[name], path).is_file()
    grafana = SERVICES["grafana"]
    assert _on_host(grafana, grafana["environment"]["GF_PATHS_PROVISIONING"]) == PROVISIONING
    dashboards = yaml.safe_load((PROVISIONING / "dashboards" / "celeriac.yml").read_text())["providers"]
    assert (_on_host(grafana, dashboards[0]["options"]["path"]) / "celeriac.json").is_file()


def test_prometheus_scrapes_one_api_and_every_program_at_the_port_that_it_serves() -> None:
    assert [each["targets"] for each in JOBS["celeriac"]["static_configs"]] == [["api:8000"]]
    (programs,) = JOBS["celeriac-programs"]["dns_sd_configs"]
    assert set(programs["names"]) == {"worker", "system", "receipts", "api"}
    for name in programs["names"]:
        environment = OURS[name]["environment"]
        port = environment["API_METRICS_PORT" if name == "api" else "WORKER_METRICS_PORT"]
        assert (int(port), environment["METRICS_HOST"]) == (programs["port"], "0.0.0.0")
        assert "default" in OURS[name]["networks"], "Prometheus must reach it"
        assert not any(mapping.endswith(f":{port}") for mapping in OURS[name].get("ports", ())), "it is not published"


def test_the_parts_of_the_profile_find_each_other() -> None:
    assert CONFIGURATION["alerting"]["alertmanagers"][0]["static_configs"] == [{"targets": ["alertmanager:9093"]}]
    (source,) = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == CONFIGURATION["global"]["scrape_interval"]
    for name, port in (("prometheus", 9090), ("alertmanager", 9093), ("grafana", 3000)):
        assert f":{port}" in " ".join(MONITORING[name]["healthcheck"]["test"])
        assert MONITORING[name]["ports"][0].endswith(f":{port}")


def test_grafana_has_no_default_login_and_no_guests() -> None:
    environment = SERVICES["grafana"]["environment"]
    assert environment["GF_SECURITY_ADMIN_PASSWORD"].startswith("${GRAFANA_PASSWORD:?")
    assert environment["GF_USERS_ALLOW_SIGN_UP"] == "false"
    assert not any("ANONYMOUS" in name for name in environment)


def test_the_panels_of_the_dashboard_do_not_overlap_and_explain_themselves() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert re.fullmatch(r"[A-Z0-9].+\.", panel["description"]), panel["title"]
            assert panel["datasource"]["uid"] == "${datasource}"
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def _on_host(service: dict[str, Any], path: str) -> Any:
    """Return the file or folder of this repository that a service has at `path`."""
    for mount in service["volumes"]:
        source, target, *_ = mount.split(":")
        if source.startswith("./") and path.startswith(target):
            return ROOT / source / path.removeprefix(target).lstrip("/")
    raise AssertionError(f"{path} is not mounted")
