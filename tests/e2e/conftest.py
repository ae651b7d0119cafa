"""One warm start and one GRPO run through the real command, for all tests that look at a finished run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.runtime.trace_files import read_spans
from tests.e2e.command import ROOT, Finished, Home

STEPS, PROMPTS, SAMPLES, VALIDATION_ROWS, WARM_STEPS = 6, 8, 4, 64, 120


@dataclass(frozen=True)
class Run:
    """A finished ``headrace run --json``."""

    home: Home
    done: Finished

    @property
    def summary(self) -> dict[str, Any]:
        """What it printed."""
        return dict(self.done.json)

    @property
    def folder(self) -> Path:
        """Its files."""
        return self.home.run(self.summary["run_id"])

    def spans(self) -> list[dict[str, Any]]:
        """Its spans, by start."""
        return read_spans(self.folder)


@dataclass(frozen=True)
class World:
    """Model, rows and recipes of the demo, made small; ``warm`` appears with the warm start."""

    folder: Path

    def recipe(self, name: str, changes: dict[str, Any]) -> Path:
        """The demo's recipe ``name`` on this world's files, with dotted ``changes``."""
        text = (ROOT / "recipes/tiny" / f"{name}.yaml").read_text().replace("build/tiny", str(self.folder))
        tree = yaml.safe_load(text)
        for key, value in changes.items():
            _set(tree, key.split("."), value)
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(tree))
        return path

    def grpo(self, **changes: Any) -> Path:
        """A few small steps, validated at both ends, with checkpoints."""
        return self.recipe(
            "arithmetic",
            {
                "grpo.num_prompts_per_step": PROMPTS,
                "grpo.num_generations_per_prompt": SAMPLES,
                "grpo.max_num_steps": STEPS,
                "grpo.val_period": 0,
                "policy.train_global_batch_size": PROMPTS * SAMPLES,
                "policy.train_micro_batch_size": PROMPTS * SAMPLES,
                "checkpointing.save_period": STEPS // 2,
                **changes,
            },
        )


def _set(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
    tree[keys[-1]] = value


def _keep(path: Path, lines: Iterable[str]) -> None:
    path.write_text("".join(lines))


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The demo's base model and rows, fewer of them to validate on."""
    folder = tmp_path_factory.mktemp("world")
    made = subprocess.run(
        [sys.executable, str(ROOT / "recipes/tiny/prepare.py"), "--out", str(folder), "--seed", "0"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    rows = folder / "validation.jsonl"
    _keep(rows, rows.read_text().splitlines(keepends=True)[:VALIDATION_ROWS])
    return World(folder)


@pytest.fixture(scope="session")
def sft_run(world: World, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A short warm start; its home is that of the GRPO run too."""
    home = Home(tmp_path_factory.mktemp("spine") / "home")
    recipe = world.recipe(
        "arithmetic-warmup", {"sft.max_num_steps": WARM_STEPS, "checkpointing.save_period": 60}
    )
    done = home.headrace("run", str(recipe), "--json")
    assert done.status == 0, done.stderr
    return Run(home, done)


@pytest.fixture(scope="session")
def grpo_run(world: World, sft_run: Run) -> Run:
    """The run that most tests look at; its stack was weighed."""
    done = sft_run.home.headrace("run", str(world.grpo()), "--json", weigh=True)
    assert done.status == 0, done.stderr
    return Run(sft_run.home, done)
