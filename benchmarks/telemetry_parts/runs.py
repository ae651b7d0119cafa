"""One run of the demo's recipe with a collector at a given address, timed and weighed.

Invariants: each run has the same recipe, model, rows and seed, and only the collector differs. Weighed
are the run's processes (the command, all below it, those that carry its home), never the collector.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.report import say
from services.runtime.errors import Internal

ROOT = Path(__file__).resolve().parents[2]
WEIGH_EVERY_S = 2.0
RUN_LIMIT_S = 3600.0
ASIDE = ("starting", "validation", "checkpoint")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished run; ``seconds`` are those of its steps (start and validation aside), ``pss`` bytes."""

    steps: int
    seconds: float
    pss: float
    """Median of the summed PSS over the later half of the run."""
    around_s: float
    """The command's time outside the run: start and end of the stack."""


def recipe(folder: Path, data: Path, model: Path, steps: int, seed: int) -> Path:
    """The demo's recipe with ``steps`` steps, without validation and checkpoints."""
    tree: dict[str, Any] = {
        "defaults": str(ROOT / "recipes/tiny/arithmetic.yaml"),
        "name": "bench-telemetry",
        "policy": {"model_name": str(model.resolve())},
        "grpo": {
            "seed": seed, "max_num_steps": steps, "val_period": 0, "val_at_start": False, "val_at_end": False,
        },
        "data": {
            name: {"data_path": str(data.resolve() / f"{name}.jsonl")} for name in ("train", "validation")
        },
        "checkpointing": {"enabled": False},
    }  # fmt: skip
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def train(path: Path, home: Path, endpoint: str, what: str) -> Outcome:
    """Run the recipe at ``path`` to its end, reporting to ``endpoint`` (empty: to nobody)."""
    say(what)
    command = [sys.executable, "-m", "services.cli.main", "run", str(path), "--json"]
    out, began = path.parent / "summary.json", time.monotonic()
    with out.open("wb") as stdout:
        process = subprocess.Popen(command, env=_environment(home, endpoint), stdout=stdout)
        weights = _weights_until_end(process, home, began + RUN_LIMIT_S)
    took = time.monotonic() - began
    if process.returncode:
        raise Internal(f"Status {process.returncode}", where=what, do="See its messages.")
    summary = json.loads(out.read_text())
    if summary["status"] != "completed" or not weights:
        raise Internal(f"The run ended as {summary['status']}: {summary['error']}", where=what)
    timing = summary["timing"]
    return Outcome(
        steps=summary["steps"],
        seconds=timing["total"] - sum(timing.get(name, 0.0) for name in ASIDE),
        pss=statistics.median(weights[len(weights) // 2 :]),
        around_s=took - timing["total"],
    )


def _weights_until_end(process: subprocess.Popen[bytes], home: Path, limit: float) -> list[int]:
    """Summed PSS every two seconds; raises Internal when the run takes too long."""
    found = []
    while process.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(WEIGH_EVERY_S)
            break
        found.append(_weigh(process.pid, home))
        if time.monotonic() > limit:
            process.terminate()
            process.wait(60)
            raise Internal(f"The run took longer than {RUN_LIMIT_S:g} s", where=str(home))
    # The last two were taken while the stack stopped.
    return found[:-2]


def _weigh(pid: int, home: Path) -> int:
    """Bytes of the run's processes. Some rewrite their titles, and with them what one sees of their
    environment: these are found as children."""
    processes: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid == pid or process.environ().get("HEADRACE_HOME") == str(home):
                processes[process.pid] = process
    for process in list(processes.values()):
        with contextlib.suppress(psutil.Error):
            processes.update({child.pid: child for child in process.children(recursive=True)})
    total = 0
    for process in processes.values():
        with contextlib.suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total


def _environment(home: Path, endpoint: str) -> dict[str, str]:
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    named = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint} if endpoint else {}
    return {**kept, **named, "PYTHONPATH": path, "HEADRACE_HOME": str(home)}
