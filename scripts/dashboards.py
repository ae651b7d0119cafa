"""Writes ``deploy/grafana/dashboards`` from the table below: ``python -m scripts.dashboards write|check``.

Invariant: a query names only metrics that :mod:`services.runtime.metrics` has (a test looks).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parents[1] / "deploy/grafana/dashboards"
SOURCE = {"type": "prometheus", "uid": "prometheus"}
RATE = "[1m]"
PHASES = 'rate(headrace_run_phase_time_seconds_total{run=~"$run", phase!="total"}[5m])'


class Panel(NamedTuple):
    """One graph: title, unit, and (legend, PromQL) of each line."""

    title: str
    unit: str
    lines: tuple[tuple[str, str], ...]


def _metric(name: str) -> tuple[str, str]:
    return name, f'headrace_run_metric{{run=~"$run", name="{name}"}}'


def _mean(name: str, by: str, matching: str = "") -> str:
    total, count = f"{name}_sum{matching}", f"{name}_count{matching}"
    return f"sum by ({by}) (rate({total}{RATE})) / sum by ({by}) (rate({count}{RATE}))"


DASHBOARDS: dict[str, tuple[Panel, ...]] = {
    "Run": (
        Panel("Step", "none", (("{{run}}", 'headrace_run_step{run=~"$run"}'),)),
        Panel("Reward", "none", (_metric("reward"),)),
        Panel("Mismatch of engine and trainer", "none",
              (_metric("token_mult_prob_error"), _metric("token_mult_prob_error_raw"))),
        Panel("KL of engine and trainer", "none", (_metric("gen_kl_error"), _metric("gen_kl_error_raw"))),
        Panel("Where the time goes", "percentunit", (
            ("{{phase}}", f"sum by (phase) ({PHASES})"),)),
        Panel("Gradient norm", "none", (_metric("grad_norm"),)),
        Panel("Age of trajectories", "none", (_metric("avg_trajectory_age"), _metric("trajectory_age_max"))),
        Panel("Lengths and truncation", "none",
              (_metric("mean_gen_tokens_per_sample"), _metric("truncation_rate"))),
    ),
    "Rollout and engines": (
        Panel("Tokens per second, by engine", "none",
              (("{{engine}}", f"sum by (engine) (rate(headrace_rollout_tokens_total{RATE}))"),)),
        Panel("Turns per second, by engine", "none",
              (("{{engine}}", f"sum by (engine) (rate(headrace_rollout_turns_total{RATE}))"),)),
        Panel("Turns at engines, and waiting", "none", (
            ("at engines", "sum(headrace_rollout_in_flight)"),
            ("waiting", "sum(headrace_rollout_waiting)"))),
        Panel("Turns repeated per second", "none",
              (("repeated", f"sum(rate(headrace_rollout_repeats_total{RATE}))"),)),
        Panel("Sampling of one turn", "s",
              (("mean", _mean("headrace_engine_turn_duration_seconds", "service_name")),)),
        Panel("Engines by state", "none", (("{{state}}", "max by (state) (headrace_refit_engines)"),)),
    ),
    "Buffer and gym": (
        Panel("Groups by state", "none",
              (("{{state}}", 'max by (state) (headrace_buffer_groups{run=~"$run"})'),)),
        Panel("Samples by state", "none",
              (("{{state}}", 'max by (state) (headrace_buffer_samples{run=~"$run"})'),)),
        Panel("Groups dropped so far", "none",
              (("{{reason}}", 'max by (reason) (headrace_buffer_dropped{run=~"$run"})'),)),
        Panel("Redeliveries and duplicates so far", "none", (
            ("redeliveries", 'max(headrace_buffer_redeliveries{run=~"$run"})'),
            ("duplicates", 'max(headrace_buffer_duplicates{run=~"$run"})'))),
        Panel("Trajectories handed in per second", "none",
              (("{{status}}", f"sum by (status) (rate(headrace_buffer_appended_total{RATE}))"),)),
        Panel("Samples that ended, per second", "none",
              (("{{outcome}}", f"sum by (outcome) (rate(headrace_gym_samples_total{RATE}))"),)),
        Panel("Samples in flight", "none", (("in flight", "sum(headrace_gym_in_flight)"),)),
        Panel("Time of one sample, by stage", "s",
              (("{{stage}}", _mean("headrace_gym_stage_duration_seconds", "stage")),)),
        Panel("Time of one score, by verifier", "s",
              (("{{verifier}}", _mean("headrace_reward_duration_seconds", "verifier")),)),
    ),
    "Trainer and refit": (
        Panel("One step, by phase", "s",
              (("{{phase}}", _mean("headrace_trainer_step_duration_seconds", "phase")),)),
        Panel("One publish, by phase", "s",
              (("{{phase}}", _mean("headrace_refit_duration_seconds", "phase")),)),
        Panel("Bytes published per second", "Bps",
              (("bytes", f"sum(rate(headrace_refit_transferred_bytes_total{RATE}))"),)),
        Panel("Committed version", "none", (("version", "max(headrace_refit_version)"),)),
        Panel("Calls per second, by code", "none",
              (("{{code}}", f"sum by (code) (rate(headrace_rpc_server_duration_seconds_count{RATE}))"),)),
        Panel("Mean time of a call, by method", "s",
              (("{{method}}", _mean("headrace_rpc_server_duration_seconds", "method")),)),
        Panel("Spans lost so far", "none",
              (("{{destination}}", "max by (destination) (headrace_telemetry_spans_dropped)"),)),
    ),
}  # fmt: skip


def dashboard(title: str) -> dict[str, Any]:
    """A dashboard as Grafana reads it."""
    variable = {
        "name": "run", "type": "query", "datasource": SOURCE, "includeAll": True, "multi": True, "refresh": 2,
        "query": "label_values(headrace_run_step, run)",
    }  # fmt: skip
    return {
        "title": f"Headrace: {title}",
        "uid": "headrace-" + title.lower().replace(" ", "-"),
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [variable]},
        "panels": [_panel(number, panel) for number, panel in enumerate(DASHBOARDS[title])],
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": SOURCE,
        "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {"refId": chr(65 + at), "datasource": SOURCE, "expr": query, "legendFormat": legend}
            for at, (legend, query) in enumerate(panel.lines)
        ],
    }


def files() -> dict[Path, str]:
    """Content by file."""
    return {
        FOLDER / f"{title.lower().replace(' ', '-')}.json": json.dumps(dashboard(title), indent=1) + "\n"
        for title in DASHBOARDS
    }


def main(verb: str) -> int:
    """``write``, or ``check`` that what is written is up to date; the exit status."""
    if verb == "write":
        FOLDER.mkdir(parents=True, exist_ok=True)
        for path, text in files().items():
            path.write_text(text)
        return 0
    stale = [path.name for path, text in files().items() if not path.is_file() or path.read_text() != text]
    if stale:
        print(f"stale: {', '.join(stale)}; run `make docs`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
