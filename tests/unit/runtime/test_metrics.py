"""Metrics: the scrape endpoint and its token, the dashboards' names, and collectors that do not answer."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TOKEN = "0123456789abcdef-token"

SCRAPE = """
import sys, urllib.error, urllib.request
from services.runtime import metrics
metrics.setup("test", "127.0.0.1:0")
for value in vars(metrics).values():
    act = [getattr(value, verb, None) for verb in ("set", "record", "add")]
    if hasattr(value, "_real_instrument"):
        next(each for each in act if each)(1, {"a": "b"})
def get(path, token=""):
    headers = {"Authorization": "Bearer " + token} if token else {}
    request = urllib.request.Request(f"http://{metrics.address()}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        return exc.code, ""
token = sys.argv[1]
print(get("/metrics")[0], get("/metrics", "wrong")[0], get("/other", token)[0])
print(get("/metrics", token)[1])
metrics.shutdown()
"""

BLACK_HOLE = """
import resource, sys, time
from pathlib import Path
from services.runtime import metrics, tracing
tracing.setup("test", Path(sys.argv[1]))
metrics.setup("test")
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
def record(count):
    began = time.perf_counter()
    for _ in range(count):
        with tracing.span("x", a=1):
            metrics.gym_samples.add(1, {"outcome": "completed"})
    return (time.perf_counter() - began) / count * 1e6
record(30000)
before = peak()
micros = record(70000)
grown = peak() - before
began = time.monotonic()
tracing.flush()
metrics.shutdown()
print(micros, grown, time.monotonic() - began, tracing.dropped_spans("collector"))
"""


def run(code: str, *args: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True, timeout=90,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), **environment}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def names_of(text: str) -> set[str]:
    return set(re.findall(r"^(headrace_\w+)\{", text, re.MULTILINE))


def test_scraping_needs_the_token_and_dashboards_name_metrics_that_exist() -> None:
    codes, _, text = run(SCRAPE, TOKEN, HEADRACE_TOKEN=TOKEN).partition("\n")
    assert codes == "401 401 404"
    known = names_of(text)
    assert {"headrace_run_step", "headrace_rpc_server_duration_seconds_bucket"} <= known
    boards = sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))
    assert len(boards) >= 4
    for board in boards:
        for panel in json.loads(board.read_text())["panels"]:
            for target in panel["targets"]:
                used = set(re.findall(r"headrace_\w+", target["expr"]))
                assert used <= known, (board.name, panel["title"], used - known)


def test_every_metric_is_documented() -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    source = (ROOT / "services/runtime/metrics.py").read_text()
    names = re.findall(r'"(headrace\.[a-z_.]+)"', source)
    assert len(names) > 20
    assert [name for name in names if f"`{name}`" not in page] == []


def test_the_dashboards_are_up_to_date() -> None:
    command = [sys.executable, "-m", "scripts.dashboards", "check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_collector_that_never_answers_costs_nothing_but_what_it_does_not_take(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        out = run(BLACK_HOLE, str(tmp_path), OTEL_EXPORTER_OTLP_ENDPOINT=address)
    micros, grown, leaving, lost = (float(part) for part in out.split())
    assert micros < 2000, "recording does not wait"
    assert grown < 60, "MiB: queues are bounded"
    assert leaving < 4, "the service's own end, bounded"
    assert lost > 50_000
