"""``headrace submit``, ``watch`` and ``runs pause|resume|cancel``: talk to a controller that already runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from protos.headrace.v1 import runs_pb2, runs_pb2_grpc
from services.cli.failures import FAILED
from services.cli.follow import follow, follower
from services.cli.output import print_json, say
from services.cli.preflight import check_recipe
from services.cli.report import print_summary
from services.cli.stacks import stacks
from services.client import AsyncClient, Client
from services.controller import summary
from services.controller.store import status_name
from services.recipe import load
from services.runtime import rpc
from services.runtime.errors import InvalidInput, NotFound, NotReady
from services.runtime.home import Home, RunPaths, default_home, resolve_run
from services.runtime.settings import split_address


def submit_command(recipe: Path, overrides: Sequence[str], address: str, *, as_json: bool) -> None:
    """Check ``recipe`` here, submit it to ``address``, say its id."""
    loaded = load(recipe, overrides)
    check_recipe(loaded)
    with _reached(address), Client(address) as client:
        run = client.submit(loaded)
    if as_json:
        print_json({"run_id": run.run, "name": run.name, "kind": run.kind, "address": address})
    else:
        print(run.run)
        say(f"follow it with: headrace watch {run.run} --address {address}")


def watch_command(name: str, address: str | None, *, as_json: bool) -> int:
    """Follow a run until it ends; 0 when it completed."""
    home = Home(default_home())
    if address is None:
        paths = resolve_run(home, name)
        ended = _ended(home, paths)
        if ended is not None:
            print_summary(ended, as_json=as_json)
            return _status(ended)
        name, address = paths.run_id, controller_of(paths)
    with _reached(address):
        found = asyncio.run(_watch(name, address))
    print_summary(found, as_json=as_json)
    return _status(found)


def act_command(verb: str, name: str, address: str | None, *, as_json: bool) -> None:
    """Pause, resume or cancel a run; says the status that it has then."""
    home = Home(default_home())
    if address is None:
        paths = resolve_run(home, name)
        ended = _ended(home, paths)
        if ended is not None and ended["status"] in ("completed", "cancelled", "failed"):
            raise InvalidInput(f"{paths.run_id} has ended: {ended['status']}", where=str(paths.root))
        name, address = paths.run_id, controller_of(paths)
    with _reached(address):
        run = asyncio.run(_act(verb, name, address))
    status = status_name(run.status)
    if as_json:
        print_json({"run_id": run.run, "status": status, "steps": run.completed_steps, "address": address})
    else:
        print(f"{run.run} {status}")


async def _act(verb: str, name: str, address: str) -> runs_pb2.Run:
    channel = rpc.connect(address, name="controller")
    try:
        stub: Any = runs_pb2_grpc.RunsStub(channel)
        if name == "last":
            newest = await stub.List(runs_pb2.ListRunsRequest(limit=1))
            if not newest.runs:
                raise NotFound("There is no run yet", where=address)
            name = newest.runs[0].run
        call, request = {
            "pause": (stub.Pause, runs_pb2.PauseRunRequest(run=name)),
            "resume": (stub.Resume, runs_pb2.ResumeRunRequest(run=name)),
            "cancel": (stub.Cancel, runs_pb2.CancelRunRequest(run=name, reason="cancelled by the user")),
        }[verb]
        answer: runs_pb2.Run = await call(request)
        return answer
    finally:
        await channel.close()


def controller_of(paths: RunPaths) -> str:
    """HOST:PORT of a controller that has the run: of its own stack, else of one that is up in this home.

    All controllers of a home share its store. Raises NotReady when none is up.
    """
    home = Home(paths.root.parent.parent)
    live = [seen for seen in stacks(home) if seen.live]
    own = [seen for seen in live if seen.name == paths.run_id]
    for seen in own + [seen for seen in live if seen.kind == "up"]:
        if (address := seen.address("controller")) is not None:
            return address
    raise NotReady(
        f"No stack of {paths.run_id} is up",
        where=str(paths.root),
        do=f"Start it with `headrace run --resume {paths.run_id}`, or give --address.",
    )


@contextmanager
def _reached(address: str) -> Iterator[None]:
    """Says in plain words that ``address`` is wrong or that nobody answers there."""
    try:
        split_address(address)
    except ValueError as exc:
        raise InvalidInput(str(exc), where="--address") from exc
    try:
        yield
    except NotReady as exc:
        if "grpc_code" not in exc.details:  # a controller did answer
            raise
        raise NotReady(
            "No controller answers",
            where=address,
            do="Start a stack (`headrace up`), or give the controller of one with --address.",
        ) from exc


async def _watch(name: str, address: str) -> dict[str, Any]:
    async with AsyncClient(address, patience_s=10.0) as client:
        if name == "last":
            runs = await client.list(1)
            if not runs:
                raise NotFound("There is no run yet", where=address)
            name = runs[0].run
        shown = follower(name)
        with shown:
            return await follow(client, name, shown)


def _ended(home: Home, paths: RunPaths) -> dict[str, Any] | None:
    return summary.load(home, paths.run_id) if summary.summary_path(paths).is_file() else None


def _status(found: dict[str, Any]) -> int:
    return 0 if found["status"] == "completed" else FAILED
