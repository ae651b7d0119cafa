"""Spans and metrics reach a collector that works; one that answers nothing gets calls and delays no exit."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.telemetry_parts.sink import Sink

ROOT = Path(__file__).resolve().parents[3]
SPANS = 700
REPORT = f"""
import random, sys
from pathlib import Path
from services.runtime import metrics, tracing
tracing.setup("gym", Path(sys.argv[1]))
metrics.setup("gym")
for _ in range({SPANS}):
    random.seed(0)
    with tracing.span("x"):
        metrics.gym_samples.add(1, {{"outcome": "completed"}})
tracing.flush()
metrics.shutdown()
print(tracing.dropped_spans(), tracing.dropped_spans("collector"))
"""


def report(endpoint: str, home: Path) -> tuple[list[int], float]:
    """What a process lost on its way to the file and to the collector, and how long it lived."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", REPORT, str(home)], cwd=ROOT, capture_output=True, text=True, timeout=60,
        env={**kept, "PYTHONPATH": str(ROOT), "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [int(part) for part in done.stdout.split()], time.monotonic() - began


def test_a_collector_gets_all_and_a_silent_one_costs_only_what_it_does_not_take(tmp_path: Path) -> None:
    with Sink("live") as live:
        lost, _ = report(live.address, tmp_path / "live")
    assert lost == [0, 0]
    assert (live.received["spans"], live.received["services"]) == (SPANS, ["gym"])
    assert live.received["metric calls"] > 0
    with Sink("silent") as silent:
        lost, seconds = report(silent.address, tmp_path / "silent")
    assert lost == [0, SPANS], "the files have them all the same"
    assert silent.received["trace calls"] > 0
    assert seconds < 15
