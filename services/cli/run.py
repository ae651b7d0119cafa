"""``headrace run``: every check, and only then anything else.

Invariant: nothing is started and nothing is written before every check has passed. What the checks do not
need (the controller's modules, the client) is imported after them, so that bad input is met at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from services.cli.job import Job
from services.cli.output import say
from services.cli.preflight import check_machine, check_recipe, reserve_ports
from services.recipe import LoadedRecipe, load
from services.recipe.files import anchored
from services.recipe.load import load_resolved
from services.runtime.errors import InvalidInput
from services.runtime.home import Home, RunPaths, default_home, resolve_run, write_atomic
from services.runtime.locks import FileLock


def run_command(recipe: Path | None, overrides: Sequence[str], *, resume: str | None, as_json: bool) -> int:
    """Run ``recipe`` or go on with ``resume``; the exit status."""
    home = Home(default_home())
    if recipe is not None and resume is None:
        return _start(load(recipe, overrides), home, None, as_json=as_json)
    if resume is None:
        raise InvalidInput("Give a recipe, or --resume RUN", do="See `headrace run --help`.")
    if recipe is not None:
        raise InvalidInput(
            "A resumed run keeps its recipe", where=str(recipe), do="Leave it out, or start a new run."
        )
    paths = resolve_run(home, resume)
    loaded = load_resolved(paths.recipe)
    ended = _ended(paths)
    if ended == "completed":
        return _show_completed(home, paths, as_json=as_json)
    if ended == "cancelled":
        raise InvalidInput(f"{paths.run_id} was cancelled", do="Start a new run.")
    return _start(loaded, home, paths, as_json=as_json)


def _start(loaded: LoadedRecipe, home: Home, paths: RunPaths | None, *, as_json: bool) -> int:
    check_recipe(loaded)
    check_machine(loaded.recipe)
    ports = reserve_ports(loaded.recipe)
    from services.cli.session import new_run, run_session

    paths = paths or home.run(new_run(loaded.recipe.name))
    lock = _claim(home, paths)
    with lock:
        if not paths.recipe.exists():
            kept = LoadedRecipe(anchored(loaded.recipe), loaded.origins, loaded.source)
            write_atomic(paths.recipe, kept.to_yaml())
        return run_session(Job(loaded, home, paths, ports), as_json=as_json)


def _claim(home: Home, paths: RunPaths) -> FileLock:
    """The run's folder, and the lock that says that a command has it in hand."""
    try:
        paths.create()
    except OSError as exc:
        raise InvalidInput(
            f"Cannot write: {exc.strerror}", where=str(home.root), do="Set HEADRACE_HOME."
        ) from exc
    lock = FileLock(paths.root / "run.lock")
    if not lock.try_lock():
        raise InvalidInput(
            f"{paths.run_id} is running", where=str(paths.root), do="Follow it with `headrace watch`."
        )
    return lock


def _ended(paths: RunPaths) -> str | None:
    """How the run ended, when it has."""
    if not (paths.root / "summary.json").is_file():
        return None
    from services.controller import summary

    found = summary.sealed(paths)
    return str(found["status"]) if found else None


def _show_completed(home: Home, paths: RunPaths, *, as_json: bool) -> int:
    from services.cli.report import print_summary
    from services.controller import summary

    say(f"{paths.run_id} has completed already")
    print_summary(summary.load(home, paths.run_id), as_json=as_json)
    return 0
