"""The files and the runs of the bench: every run is ``headrace run`` in a home of its own."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.report import say
from services.runtime.errors import Internal
from services.runtime.trace_files import read_spans

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes/tiny"
HELD_OUT = 1000
RUN_LIMIT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished run. ``steps_per_hour`` is of the time in which it trained: start, validation and
    checkpoints aside."""

    steps_per_hour: float
    accuracy: float
    median_s: float
    """Median seconds of a training sample, from claim to hand-in."""
    slowest_s: float
    age_max: float
    mismatch: float
    balanced: bool
    ledger: Mapping[str, Any]


class Folder:
    """Model, rows, recipes and runs below one directory; what is there already is not made again."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path.resolve()
        self.seed = seed
        self._home = self.path / "home"

    def prepare(self) -> None:
        """Rows with a held-out set large enough for the comparison, and the warm start."""
        if (self.path / "warm/config.json").is_file():
            return
        say(f"rows and a random model in {self.path}")
        _call([
            sys.executable, str(RECIPES / "prepare.py"), "--out", str(self.path), "--seed", str(self.seed),
            "--compact", "--held-out", str(HELD_OUT),
        ], {})  # fmt: skip
        self._run(self._recipe("arithmetic-warmup", {"sft": {"seed": self.seed}}), "warm start")

    def train(self, base: str, changes: Mapping[str, Any], what: str) -> Outcome:
        """Run the recipe ``base`` with ``changes`` to its end."""
        summary = self._run(self._recipe(base, changes), what)
        seconds = self._sample_seconds(summary["run_id"])
        timing, metrics = summary["timing"], summary["metrics"]
        aside = ("starting", "validation", "checkpoint")
        trained = timing["total"] - sum(timing.get(name, 0.0) for name in aside)
        return Outcome(
            steps_per_hour=3600 * summary["steps"] / trained,
            accuracy=summary["validation"]["final"]["accuracy"],
            median_s=statistics.median(seconds),
            slowest_s=max(seconds),
            age_max=metrics.get("token_age_max", 0.0),
            mismatch=metrics["token_mult_prob_error"],
            balanced=summary["ledger"]["balanced"],
            ledger=summary["ledger"],
        )

    def _recipe(self, base: str, changes: Mapping[str, Any]) -> Path:
        """A recipe that takes ``base``, this folder's files, and ``changes``."""
        warm_up = base.endswith("warmup")
        own: dict[str, Any] = {
            "defaults": str(RECIPES / f"{base}.yaml"),
            "name": "bench-warmup" if warm_up else "bench",
            "policy": {"model_name": str(self.path / ("base" if warm_up else "warm"))},
            "data": {"train": {"data_path": str(self.path / ("sft.jsonl" if warm_up else "train.jsonl"))}},
            "checkpointing": {"export_dir": str(self.path / "warm")} if warm_up else {"enabled": False},
        }
        if not warm_up:
            own["data"]["validation"] = {"data_path": str(self.path / "validation.jsonl")}
        path = self.path / "recipe.yaml"
        path.write_text(yaml.safe_dump({**own, **changes}))
        return path

    def _run(self, recipe: Path, what: str) -> dict[str, Any]:
        say(what)
        command = [sys.executable, "-m", "services.cli.main", "run", str(recipe), "--json"]
        summary: dict[str, Any] = json.loads(_call(command, {"HEADRACE_HOME": str(self._home)}))
        if summary["status"] != "completed":
            raise Internal(f"The run ended as {summary['status']}: {summary['error']}", where=what)
        return summary

    def _sample_seconds(self, run: str) -> list[float]:
        spans = read_spans(self._home / "runs" / run)
        training = [
            (span["end_ns"] - span["start_ns"]) / 1e9
            for span in spans
            if span["name"] == "sample" and span["attributes"].get("headrace.book") == "train"
        ]
        if not training:
            raise Internal("The run left no span of a training sample", where=run)
        return training


def _call(command: list[str], extra: Mapping[str, str]) -> str:
    """Run ``command``; its progress goes to our stderr. Raises Internal when it fails."""
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path, **extra}, stdout=subprocess.PIPE, text=True,
        timeout=RUN_LIMIT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise Internal(f"Status {done.returncode}", where=" ".join(command[1:4]), do="See its messages.")
    return done.stdout
