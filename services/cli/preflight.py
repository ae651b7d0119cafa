"""Everything that can be known to be wrong before a process is started.

Each function raises one RecipeError or InvalidInput with one clear line; order is from cheap to costly.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from services.cli.roster import SERVICES
from services.recipe import LoadedRecipe, Recipe, RecipeError
from services.recipe.data_check import check_data
from services.recipe.errors import BadKeyError
from services.recipe.files import check_files
from services.recipe.not_built import refuse_not_built
from services.recipe.stack import Stack as StackSection
from services.runtime.errors import InvalidInput, NotReady
from services.runtime.home import default_home
from services.runtime.ports import ReservedPort
from services.runtime.redis_server import find_server
from services.runtime.settings import checked_listen, split_address

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the embedded stack: ``name`` is the service's, with a number where there are several."""

    name: str
    service: str


def processes(recipe: Recipe) -> list[Process]:
    """The processes that ``recipe`` needs, in the order of the start."""
    return members(recipe.stack, [name for name, known in SERVICES.items() if known.embedded])


def members(stack: StackSection, services: Iterable[str], numbered: Collection[str] = ()) -> list[Process]:
    """One process for each of ``services``, or as many as ``stack`` says; those are numbered, and so are
    those of ``numbered`` however few there are."""
    counts = {"engine": stack.engines, **stack.replicas.model_dump()}
    found = []
    for service in services:
        count = counts.get(service, 1)
        plain = count == 1 and service not in numbered
        names = [service] if plain else [f"{service}-{i}" for i in range(count)]
        found += [Process(name, service) for name in names]
    return found


def check_recipe(loaded: LoadedRecipe) -> dict[str, int]:
    """Features, files and rows; returns the number of rows by data key."""
    located(loaded, refuse_not_built)
    located(loaded, check_files)
    return check_data(loaded.recipe)


def check_machine(recipe: Recipe) -> None:
    """The programs that the stack needs, and its devices."""
    check_programs(recipe.stack.redis_url)
    if recipe.cluster.gpus_per_node and not list(Path("/dev").glob("nvidia[0-9]*")):
        raise InvalidInput(
            "This machine has no GPU", where="cluster.gpus_per_node", do="Set it to 0 to run on the CPU."
        )


def check_programs(redis_url: str | None) -> None:
    """The heavy packages, and a Redis."""
    for package in ("torch", "transformers", "vllm"):
        if importlib.util.find_spec(package) is None:
            raise InvalidInput(
                f"{package} is not installed",
                do="Install headrace with the extra cpu or gpu; see `headrace doctor`.",
            )
    if redis_url is None:
        find_server()
    else:
        _check_redis(redis_url)


def _check_redis(url: str) -> None:
    """An external Redis answers and does not evict."""
    from services.runtime.redis import acquire

    try:
        acquire(default_home(), url).close()
    except NotReady as exc:
        raise InvalidInput(
            "No Redis answers", where=url, do="Start it, or set stack.redis_url to null."
        ) from exc


def reserve_ports(recipe: Recipe) -> dict[str, ReservedPort]:
    """Process name -> its port, held until closed. Raises InvalidInput when an explicit one is taken."""
    held: dict[str, ReservedPort] = {}
    try:
        for process in processes(recipe):
            host, port = _wanted(recipe, process)
            held[process.name] = ReservedPort.explicit(host, port) if port else ReservedPort.free(host)
    except BaseException:
        for reserved in held.values():
            reserved.close()
        raise
    return held


def located(loaded: LoadedRecipe, rule: Callable[[Recipe], None]) -> None:
    """Apply ``rule``; what it finds is named with the place where the key was written."""
    try:
        rule(loaded.recipe)
    except BadKeyError as exc:
        raise RecipeError(exc.message, where=loaded.where(exc.key), do=exc.do) from exc


def _wanted(recipe: Recipe, process: Process) -> tuple[str, int]:
    """HOST and PORT of a process; port 0 is any. The environment wins over the recipe."""
    key = f"{SERVICES[process.service].prefix}LISTEN"
    named = os.environ.get(key)
    numbered = process.name != process.service
    if named is None or numbered:
        port = None if numbered else getattr(recipe.stack.ports, process.service, None)
        return HOST, port or 0
    try:
        host, port = split_address(checked_listen(named))
    except ValueError as exc:
        raise InvalidInput(str(exc), where=key) from exc
    return host, port
