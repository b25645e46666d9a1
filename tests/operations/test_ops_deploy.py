"""What deploy/ and the documents say about a server holds for a real one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import promql_parser
import pytest
import yaml
from live_server import run, until
from operated import Samples, operated

from dcut_server.cli import build_parser
from dcut_server.client import CallFailed, DcutClient
from dcut_server.serve_options import ServeOptions
from dcut_trt.backends.scripted import scripted_engine

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILES = ("Dockerfile", "Dockerfile.tensorrt")


@pytest.fixture(scope="module")
def scraped() -> Samples:
    """A scrape after some requests, one of which failed."""
    kept: Samples = {}

    async def test() -> None:
        engine = scripted_engine()
        async with operated(engine, ServeOptions(port=0, metrics_port=0)) as running:
            async with DcutClient(running.server.address) as client:
                await client.complete("a", max_tokens=30, ignore_eos=True)
                engine.scheduler.schedule = lambda _: 1 / 0
                with pytest.raises(CallFailed):
                    await client.complete("b")
            await until(lambda: len(running.finals) == 2)
            kept.update(await running.scrape())

    run(test)
    return kept


def panels() -> list[dict]:
    return json.loads((DEPLOY / "grafana/dcut-trt.json").read_text())["panels"]


def test_every_query_of_the_dashboard_finds_metrics_of_a_real_scrape(scraped: Samples) -> None:
    names = {f"dcut_{name}" for name, _ in scraped}
    labels = {label for _, pairs in scraped for label, _ in pairs}
    queries = [(target["expr"], target["legendFormat"]) for panel in panels() for target in panel["targets"]]
    assert len(queries) > 25
    for query, legend in queries:
        promql_parser.parse(query.replace("$__rate_interval", "30s"))
        used = set(re.findall(r"dcut_\w+", query))
        assert used, query
        assert used <= names, f"{query} asks for {used - names}"
        for group in re.findall(r"by \(([^)]*)\)", query):
            assert {label.strip() for label in group.split(",")} <= labels, query
        for label in re.findall(r"{{(\w+)}}", legend):
            assert label in labels


def test_panels_do_not_overlap_and_name_one_data_source() -> None:
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels()]
    assert len(set(places)) == len(places)
    source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())
    assert {panel["datasource"]["uid"] for panel in panels()} == {source["datasources"][0]["uid"]}


def test_the_documented_metrics_are_those_of_a_real_scrape(scraped: Samples) -> None:
    text = (ROOT / "docs/operations.md").read_text()
    table = text[text.index("| metric (prefix") : text.index("## Traces")]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    real = {re.sub(r"_(bucket|sum|count)$", "", name) for name, _ in scraped if not name.endswith("_created")}
    assert documented == real


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfiles_pass_hadolint_and_run_commands_that_exist(name: str) -> None:
    linted = subprocess.run(
        [str(Path(sys.executable).with_name("hadolint")), str(DEPLOY / name)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert linted.returncode == 0, linted.stdout
    text = (DEPLOY / name).read_text()
    entry, flags = (json.loads(re.search(rf"^{word} (.*)$", text, re.MULTILINE)[1]) for word in ("ENTRYPOINT", "CMD"))
    args = build_parser().parse_args([*entry[1:], *flags])
    assert entry[0] == "dcut-trt"
    assert f"EXPOSE {args.port} {args.metrics_port}" in text
    shipped = (DEPLOY / f"{name}.dockerignore").read_text().split()
    for path in (line.removeprefix("!") for line in shipped if line.startswith("!")):
        assert (ROOT / path).exists()


def test_compose_prometheus_and_grafana_fit_together() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = compose["services"]
    assert services["server"]["build"]["dockerfile"] == "deploy/Dockerfile"
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service.get("ports", ()))
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source.startswith("${DCUT_BUNDLE") or (DEPLOY / source).exists()
        assert "build" in service or re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", service["image"])
    prometheus = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert source["jsonData"]["timeInterval"] == prometheus["global"]["scrape_interval"]
    (target,) = prometheus["scrape_configs"][0]["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert host in services
    assert f'"--metrics-port", "{port}"' in (DEPLOY / "Dockerfile").read_text()
    assert f"127.0.0.1:{port}/readyz" in str(services["server"]["healthcheck"]["test"])
