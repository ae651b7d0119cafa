"""Are the rows of a Gym JSONL file usable? Asked before anything starts; the first bad row is named by line.

Invariants: every line is parsed, so that a run cannot die of row 9,000 after an hour; nothing is kept of a
row, so that large files cost time and no memory. About 100,000 short rows per second.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from services.recipe import names
from services.recipe.errors import RecipeError
from services.recipe.root import Recipe
from services.recipe.surroundings import Env

# Keys that say how a row is played; whatever else it carries is for its verifier.
_ROUTING = frozenset({
    "responses_create_params", "agent_ref", "environment", "verifier", "num_repeats",
    "_ng_task_index", "_ng_rollout_index", "_ng_rollout_id", "skills_ref",
})  # fmt: skip


def check_data(recipe: Recipe) -> dict[str, int]:
    """Rows of each data file of the recipe, by key; raises :class:`RecipeError` at the first bad one."""
    verified = recipe.kind == "grpo"
    counts = {"data.train": check_file(recipe.data.train.data_path, recipe.env, verified=verified)}
    if recipe.data.validation is not None and verified:
        path = recipe.data.validation.data_path
        counts["data.validation"] = check_file(path, recipe.env, verified=verified)
    return counts


def check_file(path: str | Path, env: Env, *, verified: bool) -> int:
    """Number of rows in ``path``; ``verified`` rows need a verifier and something for it to look at."""
    count = 0
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    _check_row(line, f"{path}:{number}", env, verified=verified)
                    count += 1
    except OSError as exc:
        raise RecipeError(
            f"Cannot read data file {path}: {exc.strerror}", do="Check data.train and data.validation."
        ) from exc
    if not count:
        raise RecipeError("The data file has no rows", where=str(path))
    return count


def _check_row(line: bytes, where: str, env: Env, *, verified: bool) -> None:
    row = _parsed(line, where)
    create = row.get("responses_create_params")
    if create is None:
        raise RecipeError(
            "A row without responses_create_params",
            where=where,
            do="Rows are NeMo Gym JSONL; see the recipe guide.",
        )
    if not isinstance(create, dict) or not create.get("input"):
        raise RecipeError(
            "responses_create_params has no input", where=where, do="Give it a text or messages."
        )
    if isinstance(row.get("environment"), str):
        _known("environment", row["environment"], names.environments(env), where)
    if verified:
        _check_verified(row, where, env)
    else:
        _check_answer(row, create["input"], where)


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as exc:
        reason = exc.msg if isinstance(exc, json.JSONDecodeError) else "not UTF-8"
        raise RecipeError(f"A row that is not JSON: {reason}", where=where) from exc
    if not isinstance(row, dict):
        raise RecipeError("A row that is no JSON object", where=where)
    return row


def _known(what: str, name: str, known: set[str], where: str) -> None:
    if name not in known:
        raise RecipeError(
            f"A row that names an unknown {what}, {name!r}", where=where, do=names.remedy(name, known)
        )


def _check_verified(row: dict[str, Any], where: str, env: Env) -> None:
    environment = env.environments.get(str(row.get("environment") or _agent_name(row)))
    verifier = row.get("verifier") or (environment and environment.verifier) or env.default_verifier
    if not verifier:
        raise RecipeError(
            "A row that names no verifier",
            where=where,
            do='Add "verifier" to it, or set env.default_verifier.',
        )
    _known("verifier", str(verifier), names.verifiers(env), where)
    if not names.chooses_agent(environment) and _agent_name(row):
        _known("agent", _agent_name(row), names.agents(env), where)
    if _ROUTING.issuperset(row):
        raise RecipeError(
            "A row with nothing to verify against",
            where=where,
            do="Add the verifier's fields, as expected_answer.",
        )


def _agent_name(row: dict[str, Any]) -> str:
    ref = row.get("agent_ref")
    return str(ref.get("name", "")) if isinstance(ref, dict) else ""


def _check_answer(row: dict[str, Any], conversation: Any, where: str) -> None:
    """Supervised rows end in what is to be learned: a ``target`` text, or an assistant message."""
    messages = conversation if isinstance(conversation, list) else []
    roles = [item.get("role") for item in messages if isinstance(item, dict)]
    if not isinstance(row.get("target"), str) and roles[-1:] != ["assistant"]:
        raise RecipeError(
            "A supervised row with nothing to learn",
            where=where,
            do='Add a "target" text to it, or end its input with an assistant message.',
        )
