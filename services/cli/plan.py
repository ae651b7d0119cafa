"""``headrace plan``: what a recipe means before anything is started."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from services.cli.output import console, print_json
from services.cli.preflight import processes
from services.recipe import LoadedRecipe, load
from services.recipe.not_built import NO_EFFECT, not_built


def plan_command(recipe: Path, overrides: Sequence[str], *, as_json: bool) -> None:
    """Print the plan of ``recipe``."""
    plan = make_plan(load(recipe, overrides))
    if as_json:
        print_json(plan)
    else:
        _print_plan(plan)


def make_plan(loaded: LoadedRecipe) -> dict[str, Any]:
    """Sizes, processes, what is not built, and every key with its origin."""
    recipe, values = loaded.recipe, loaded.recipe.model_dump(mode="json")
    samples = recipe.prompts_per_step * recipe.generations_per_prompt
    return {
        "name": recipe.name,
        "kind": recipe.kind,
        "source": loaded.source,
        "steps": recipe.max_steps,
        "staleness": recipe.stack.prefetch_steps if recipe.kind == "sft" else 0,
        "samples_per_step": samples,
        "optimizer_steps_per_step": samples // recipe.policy.train_global_batch_size,
        "processes": [process.name for process in processes(recipe)],
        "gpus": recipe.cluster.gpus_per_node * recipe.cluster.num_nodes,
        "not_built": {found.key: found.value for found in not_built(recipe)},
        "no_effect": sorted(key for key in NO_EFFECT if loaded.origins.get(key, "default") != "default"),
        "keys": {
            key: {"value": _at(values, key), "origin": loaded.origins[key]} for key in sorted(loaded.origins)
        },
    }


def _at(values: dict[str, Any], key: str) -> Any:
    found: Any = values
    for part in key.split("."):
        found = found[part]
    return found


def _print_plan(plan: dict[str, Any]) -> None:
    out = console()
    head = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name in (
        "name",
        "kind",
        "steps",
        "staleness",
        "samples_per_step",
        "optimizer_steps_per_step",
        "gpus",
    ):
        head.add_row(name.replace("_", " "), str(plan[name]))
    head.add_row("processes", ", ".join(plan["processes"]))
    out.print(head)
    for key, value in plan["not_built"].items():
        out.print(f"not built yet: {key} = {json.dumps(value)}", style="yellow", markup=False)
    for key in plan["no_effect"]:
        out.print(f"without effect for now: {key}", style="yellow", markup=False)
    keys = Table("key", "value", "origin", box=None, padding=(0, 2, 0, 0))
    for key, entry in plan["keys"].items():
        style = "dim" if entry["origin"] == "default" else ""
        keys.add_row(key, json.dumps(entry["value"]), entry["origin"], style=style)
    out.print(keys)
