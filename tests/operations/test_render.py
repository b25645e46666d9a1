"""deploy/grafana/render.py draws what a Prometheus answers and names the panel that it cannot draw."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy/grafana/dcut-trt.json"
PNG = b"\x89PNG\r\n\x1a\n"


class Prometheus(ThreadingHTTPServer):
    """Answers queries with one series in Prometheus' shapes. empty, refused: part of one with none, with an error."""

    empty: str | None = None
    refused: str | None = None

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, dict[str, str]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Prometheus

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        asked = {name: values[0] for name, values in parse_qs(address.query).items()}
        self.server.asked.append((address.path, asked))
        if self.server.refused is not None and self.server.refused in asked["query"]:
            self._reply(400, {"status": "error", "errorType": "bad_data", "error": "parse error: at char 3"})
            return
        metric = {
            "state": "serving",
            "ratio": "0.5",
            "position": "0",
            "stage": "draft",
            "kind": "decode",
            "code": "INTERNAL",
        }
        kind, row = "vector", {"metric": metric, "value": [float(asked.get("time", 0)), "1"]}
        if address.path == "/api/v1/query_range":
            moments = range(int(asked["start"]), int(asked["end"]) + 1, int(asked["step"]))
            # The first half has no samples, and a rate without traffic is NaN.
            values = [[moment, "NaN" if moment % 5 == 0 else "0.25"] for moment in moments[len(moments) // 2 :]]
            kind, row = "matrix", {"metric": metric, "values": values}
        rows = [] if self.server.empty is not None and self.server.empty in asked["query"] else [row]
        self._reply(200, {"status": "success", "data": {"resultType": kind, "result": rows}})

    def _reply(self, status: int, body: object) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def prometheus() -> Iterator[Prometheus]:
    with Prometheus() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def render(url: str, out: Path, dashboard: Path = DASHBOARD) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("matplotlib")
    options = ["--prometheus", url, "--minutes", "2", "--dashboard", dashboard, "--out", out]
    command = [sys.executable, ROOT / "deploy/grafana/render.py", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_every_query_of_the_dashboard_is_asked_and_drawn(prometheus: Prometheus, tmp_path: Path) -> None:
    done = render(prometheus.url, tmp_path / "out.png")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.png").read_bytes().startswith(PNG)
    targets = [target for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel["targets"]]
    kinds = {True: "/api/v1/query", False: "/api/v1/query_range"}
    expected = [(kinds[bool(t.get("instant"))], t["expr"].replace("$__rate_interval", "20s")) for t in targets]
    assert [(path, asked["query"]) for path, asked in prometheus.asked] == expected


@pytest.mark.parametrize("fault", ["empty", "refused"])
def test_a_query_without_an_answer_names_its_panel(prometheus: Prometheus, tmp_path: Path, fault: str) -> None:
    setattr(prometheus, fault, "dcut_kv_cache_utilization")
    done = render(prometheus.url, tmp_path / "out.png")
    assert done.returncode == 1
    reason = {"empty": "no data", "refused": "parse error: at char 3"}[fault]
    assert re.fullmatch(rf"render.py: panel 'KV cache in use': avg\(.*\): .*{reason}.*\n", done.stderr)
    assert not (tmp_path / "out.png").exists()


def test_variables_are_those_of_the_dashboard(prometheus: Prometheus, tmp_path: Path) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    dashboard["templating"] = {"list": [{"name": "instance", "current": {"value": "a:9400"}}]}
    target = {"expr": 'up{instance="$instance"} + ${instance:raw}', "legendFormat": "{{ code }}"}
    dashboard["panels"] = [dashboard["panels"][1] | {"targets": [target]}]
    path = tmp_path / "dashboard.json"
    path.write_text(json.dumps(dashboard))
    assert render(prometheus.url, tmp_path / "out.png", path).returncode == 0
    assert [asked["query"] for _, asked in prometheus.asked] == ['up{instance="a:9400"} + a:9400']
    path.write_text(json.dumps(dashboard | {"templating": {"list": []}}))
    done = render(prometheus.url, tmp_path / "out.png", path)
    assert done.returncode == 1
    assert done.stderr.endswith(": unknown variable $instance\n")


def test_no_prometheus_is_one_line(prometheus: Prometheus, tmp_path: Path) -> None:
    prometheus.server_close()
    done = render(prometheus.url, tmp_path / "out.png")
    assert done.returncode == 1
    assert re.fullmatch(r"render.py: panel 'Server state': .*refused.*\n", done.stderr)
