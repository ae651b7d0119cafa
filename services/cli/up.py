"""``headrace up`` and ``headrace down``: a stack that stays, under a supervisor in the background.

Invariants: ``up`` returns once everything is ready, or says what is not and leaves nothing running; every
wait is bounded; a stack that is up is never started twice, only scaled.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from services.cli.board import READY, read_board
from services.cli.daemon import Spec, read_spec
from services.cli.output import print_json, say
from services.cli.preflight import check_programs
from services.cli.stack import ROOT
from services.cli.stacks import Seen, is_held, live_stack, seen_stack
from services.recipe import load
from services.recipe.stack import Stack as StackSection
from services.runtime.errors import InvalidInput, NotReady, TimedOut
from services.runtime.home import Home, StackPaths, default_home, write_atomic

POLL_S = 0.1
MARGIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """The options of ``headrace up``; None where nothing was said."""

    name: str
    recipe: Path | None
    ports: str
    counts: dict[str, int]
    """Processes of engine, gym, reward and buffer, those that were given."""


def up_command(wanted: Wanted, *, as_json: bool) -> int:
    """Start stack ``wanted``, or scale it when it is up."""
    home = Home(default_home())
    paths = home.stack(wanted.name)
    seen = seen_stack(home, wanted.name)
    if seen is not None and seen.live:
        _scale(paths, seen, wanted)
    else:
        _start(paths, wanted)
    _tell(live_stack(home, wanted.name), as_json=as_json)
    return 0


def down_command(name: str, *, kill: bool, as_json: bool) -> int:
    """Stop stack ``name`` in order, or at once."""
    home = Home(default_home())
    seen = seen_stack(home, name)
    if seen is None:
        raise InvalidInput(f"No stack {name!r} is up", where=str(home.stacks))
    stopped = seen.live
    if stopped:
        _stop(home.stack(name), seen, kill=kill)
    home.stack(name).board.unlink(missing_ok=True)
    if as_json:
        print_json({"stack": name, "stopped": stopped, "was": seen.state})
    else:
        say(f"{name} is down" if stopped else f"{name} was {seen.state}; its record is removed")
    return 0


def section(wanted: Wanted, base: StackSection) -> StackSection:
    """The recipe's ``stack`` with the counts that were given."""
    replicas = {name: wanted.counts[name] for name in ("buffer", "gym", "reward") if name in wanted.counts}
    values = base.model_dump()
    values["replicas"] |= replicas
    values["engines"] = wanted.counts.get("engine", base.engines)
    return StackSection.model_validate(values)


def _start(paths: StackPaths, wanted: Wanted) -> None:
    base = load(wanted.recipe).recipe.stack if wanted.recipe is not None else StackSection()
    stack = section(wanted, base)
    check_programs(stack.redis_url)
    try:
        paths.logs.mkdir(parents=True, exist_ok=True)
        paths.board.unlink(missing_ok=True)
        write_atomic(paths.spec, Spec(stack, wanted.ports, 0).to_json())
    except OSError as exc:
        raise InvalidInput(
            f"Cannot write: {exc.strerror}", where=str(paths.root), do="Set HEADRACE_HOME."
        ) from exc
    log = paths.logs / "supervisor.log"
    process = _spawn(paths, log)
    try:
        _until_ready(paths, process, log, _patience(stack))
    except BaseException:
        if process.poll() is None:
            process.terminate()
            process.wait(_stop_seconds(stack))
        raise


def _spawn(paths: StackPaths, log: Path) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "services.cli.daemon", str(paths.root)],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd="/",
            env={**os.environ, "PYTHONPATH": path, "HEADRACE_HOME": str(paths.root.parent.parent)},
            start_new_session=True,
        )  # fmt: skip


def _until_ready(paths: StackPaths, process: subprocess.Popen[bytes], log: Path, patience: float) -> None:
    began, told = time.monotonic(), set[str]()
    while True:
        ended = process.poll()
        board = read_board(paths.board)
        if board is not None and board["pid"] == process.pid:
            _progress(board, told, time.monotonic() - began)
            if board["state"] == READY:
                return
        if ended is not None:
            raise _failed(board, ended, log)
        if time.monotonic() - began > patience:
            raise NotReady(f"{paths.name} was not ready within {patience:g} s", where=_waiting(board))
        time.sleep(POLL_S)


def _progress(board: dict[str, Any], told: set[str], elapsed: float) -> None:
    for row in board["processes"]:
        if row["ready"] and row["name"] not in told:
            told.add(row["name"])
            say(f"{row['name']} is ready after {elapsed:.1f} s")


def _failed(board: dict[str, Any] | None, status: int, log: Path) -> InvalidInput | NotReady:
    if board is not None and board["error"]:
        return NotReady(board["error"], where=_waiting(board))
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    text = lines[-1] if lines else f"The supervisor ended with status {status}"
    return InvalidInput(text) if status == 2 else NotReady(text, where=str(log))


def _waiting(board: dict[str, Any] | None) -> str:
    """What is not ready, and where its log is."""
    rows = board["processes"] if board is not None else []
    return ", ".join(f"{row['name']}: {row['log']}" for row in rows if not row["ready"])


def _scale(paths: StackPaths, seen: Seen, wanted: Wanted) -> None:
    fixed = sorted(set(wanted.counts) - {"gym", "engine"})
    if not wanted.counts or wanted.recipe is not None:
        raise InvalidInput(
            f"Stack {wanted.name} is up already",
            where=seen.address("controller") or str(paths.root),
            do="Scale it with --gym or --engines, or stop it with `headrace down`.",
        )
    if fixed or seen.state != READY:
        what = f"--{fixed[0]} is fixed while a stack is up" if fixed else f"The stack is {seen.state}"
        raise InvalidInput(what, where=wanted.name, do="Try later, or stop it first with `headrace down`.")
    spec = read_spec(paths.spec)
    request = spec.request + 1
    stack = section(wanted, spec.stack)
    write_atomic(paths.spec, Spec(stack, spec.ports, request).to_json())
    end = time.monotonic() + _patience(stack) + _stop_seconds(stack)
    while True:
        board = read_board(paths.board)
        if board is None or not is_held(paths.lock):
            raise NotReady(f"Stack {wanted.name} went down", where=str(paths.logs))
        if board["notice"].get("request") == request:
            break
        if time.monotonic() > end:
            raise TimedOut(f"{wanted.name} was not scaled in time", where=_waiting(board))
        time.sleep(POLL_S)
    if board["notice"]["error"]:
        raise NotReady(board["notice"]["error"])


def _stop(paths: StackPaths, seen: Seen, *, kill: bool) -> None:
    pids = [row["pid"] for row in seen.board["processes"] if row["pid"]]
    spec = read_spec(paths.spec)
    # Its lock is held, so the pid on the board is alive and its own.
    os.kill(seen.board["pid"], signal.SIGKILL if kill else signal.SIGTERM)
    end = time.monotonic() + _stop_seconds(spec.stack)
    while is_held(paths.lock) or (kill and any(map(psutil.pid_exists, pids))):
        if time.monotonic() > end:
            raise TimedOut(
                f"{paths.name} did not stop in time", where=str(paths.logs), do="Use `headrace down --kill`."
            )
        time.sleep(POLL_S)


def _patience(stack: StackSection) -> float:
    longest = (stack.engine_start_timeout_s, stack.trainer_start_timeout_s, stack.service_start_timeout_s)
    return max(longest) + MARGIN_S


def _stop_seconds(stack: StackSection) -> float:
    return 3 * (stack.drain_seconds + 5.0) + MARGIN_S


def _tell(seen: Seen, *, as_json: bool) -> None:
    addresses = {row["name"]: row["address"] for row in seen.board["processes"]}
    if as_json:
        print_json(
            {
                "stack": seen.name, "state": seen.state, "controller": seen.address("controller"),
                "gateway": seen.address("gateway"), "addresses": addresses, "logs": str(seen.root / "logs"),
            }
        )  # fmt: skip
        return
    for name, address in addresses.items():
        print(f"{name:<12} {address}")
    say(f"{seen.name} is up; submit with: headrace submit RECIPE --address {seen.address('controller')}")
