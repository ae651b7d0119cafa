"""``headrace ps``: the processes of every stack of this home, and the run in hand."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import psutil
from rich.table import Table

from protos.headrace.v1 import runs_pb2
from services.cli.daemon import read_spec
from services.cli.output import console, print_json, say
from services.cli.stacks import Seen, stacks
from services.controller.store import RunStore
from services.runtime import redis
from services.runtime.errors import HeadraceError
from services.runtime.home import Home, default_home
from services.runtime.redis_errors import translated

MIB = 2**20
RECENT = 100
_IN_HAND = (runs_pb2.RUN_STATUS_STARTING, runs_pb2.RUN_STATUS_RUNNING, runs_pb2.RUN_STATUS_PAUSED)


def ps_command(*, as_json: bool) -> int:
    """Print what runs."""
    home = Home(default_home())
    found = [describe(seen) for seen in stacks(home)]
    if as_json:
        print_json(found)
        return 0
    if not found:
        say(f"nothing runs in {home.root}")
    for stack in found:
        _print(stack)
    return 0


def describe(seen: Seen) -> dict[str, Any]:
    """One stack with its processes; memory in bytes, times in seconds."""
    rows = [_process(row) for row in seen.board["processes"]] if seen.live else []
    run = (seen.name, None) if seen.kind == "run" else _in_hand(seen)
    return {
        "stack": seen.name, "kind": seen.kind, "state": seen.state, "error": seen.board["error"],
        "pid": seen.board["pid"] if seen.live else None, "run": run[0], "run_unknown": run[1],
        "controller": seen.address("controller"), "gateway": seen.address("gateway"), "processes": rows,
    }  # fmt: skip


def _process(row: dict[str, Any]) -> dict[str, Any]:
    state = "ready" if row["ready"] else "starting" if row["pid"] else "restarting"
    uptime, memory = _measured(row["pid"]) if row["pid"] else (None, None)
    return {**row, "state": state, "uptime_s": uptime, "pss_bytes": memory}


def _measured(pid: int) -> tuple[float | None, int | None]:
    """Seconds since the start, and the PSS of the process and all below it; None for what has gone."""
    try:
        process = psutil.Process(pid)
        uptime = time.time() - process.create_time()
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return None, None
    return uptime, sum(_pss(each) for each in family)


def _pss(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0  # it ended meanwhile, or is not ours


def _in_hand(seen: Seen) -> tuple[str | None, str | None]:
    """The run that the stack's controller drives, or why that is unknown."""
    if not seen.live:
        return None, None
    try:
        return asyncio.run(_driven(seen)), None
    except HeadraceError as exc:
        return None, str(exc)


async def _driven(seen: Seen) -> str | None:
    url = read_spec(seen.root / "spec.json").stack.redis_url
    with redis.acquire(seen.root.parent.parent, url) as handle:
        client = redis.connect(handle.url)
        store = RunStore(client)
        try:
            with translated(handle.url):
                for run in await store.newest(RECENT):
                    ours = (await store.fields(run.run)).get("stack") == seen.name
                    if run.status in _IN_HAND and ours and await store.leased(run.run):
                        return run.run
        finally:
            await client.aclose()
    return None


def _print(stack: dict[str, Any]) -> None:
    out = console()
    facts = [f"{stack['stack']} ({stack['kind']})", stack["state"]]
    facts += [f"run {stack['run']}"] if stack["run"] else []
    facts += [stack["error"]] if stack["error"] else []
    out.print("  ".join(facts), markup=False, style="bold")
    if not stack["processes"]:
        return
    table = Table(
        "name", "pid", "state", "address", "restarts", "up", "memory", box=None, padding=(0, 2, 0, 0)
    )
    for row in stack["processes"]:
        up = "" if row["uptime_s"] is None else f"{row['uptime_s']:.0f} s"
        memory = "" if row["pss_bytes"] is None else f"{row['pss_bytes'] / MIB:.0f} MiB"
        cells = (row["name"], str(row["pid"]), row["state"], row["address"], str(row["restarts"]), up, memory)
        table.add_row(*cells)
    out.print(table)
