"""``headrace plan``: what a recipe means before anything is started."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from services.cli.estimate import buffer_bytes, devices, memory, rows_of, staleness, totals
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
    """Sizes, processes, memory, staleness, what is not built, and every key with its origin."""
    recipe, values = loaded.recipe, loaded.recipe.model_dump(mode="json")
    samples = recipe.prompts_per_step * recipe.generations_per_prompt
    return {
        "name": recipe.name,
        "kind": recipe.kind,
        "source": loaded.source,
        "steps": recipe.max_steps,
        "samples_per_step": samples,
        "optimizer_steps_per_step": samples // recipe.policy.train_global_batch_size,
        "totals": totals(recipe, rows_of(recipe.data.train.data_path)),
        "processes": [process.name for process in processes(recipe)],
        "gpus": devices(recipe),
        "staleness": staleness(recipe),
        "memory": [figure.to_dict() for figure in [*memory(recipe), buffer_bytes(recipe)]],
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
    for name, text in _head(plan):
        head.add_row(name, text)
    out.print(head)
    table = Table("memory", "size", "", box=None, padding=(0, 2, 0, 0))
    for figure in plan["memory"]:
        size = "unknown" if figure["bytes"] is None else _size(figure["bytes"])
        table.add_row(figure["name"], size, figure["why"])
    out.print(table)
    for key, value in plan["not_built"].items():
        out.print(f"not built yet: {key} = {json.dumps(value)}", style="yellow", markup=False)
    for key in plan["no_effect"]:
        out.print(f"without effect for now: {key}", style="yellow", markup=False)
    keys = Table("key", "value", "origin", box=None, padding=(0, 2, 0, 0))
    for key, entry in plan["keys"].items():
        style = "dim" if entry["origin"] == "default" else ""
        keys.add_row(key, json.dumps(entry["value"]), entry["origin"], style=style)
    out.print(keys)


def _head(plan: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and text of each line above the tables."""
    counts = Counter(name.rpartition("-")[0] or name for name in plan["processes"])
    flight, gpus, whole = plan["staleness"], plan["gpus"], plan["totals"]
    yield "name", f"{plan['name']} ({plan['kind']})"
    per_step = f"{plan['samples_per_step']} samples, {plan['optimizer_steps_per_step']} optimizer steps"
    yield "a step", per_step
    rows = "rows unknown: the file is not here"
    if whole["rows"] is not None:
        rows = f"{whole['rows']:,} rows, {whole['epochs']:.2f} epochs"
    yield (
        "in all",
        f"{whole['steps']:,} steps, {whole['prompts']:,} prompts, {whole['samples']:,} samples; {rows}",
    )
    yield "processes", ", ".join(f"{name} × {n}" if n > 1 else name for name, n in counts.items())
    if gpus["given"]:
        together = "; they share devices" if gpus["shared"] else ""
        yield "GPUs", f"trainer {gpus['trainer']}, engines {gpus['engines']}, given {gpus['given']}{together}"
    else:
        yield "GPUs", "none"
    ahead, oldest = flight["steps_ahead"], flight["oldest_trained_token"]
    yield "staleness", f"W = {ahead}; a trained token is at most {oldest} versions old"
    tokens = f"{flight['samples_in_flight_most']:,} samples, {flight['tokens_in_flight_most']:,} tokens"
    yield (
        "in flight",
        f"at most {flight['open_groups_most']:,} groups ({flight['open_groups_why']}), {tokens}",
    )
    yield "publish", f"{flight['publish']}, order {flight['order']}"


def _size(count: int) -> str:
    """``count`` bytes in the largest unit that keeps a digit before the point."""
    for unit, width in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= width:
            return f"{count / width:.2f} {unit}"
    return f"{count} B"
