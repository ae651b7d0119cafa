"""Following a run: events in, progress on stderr out.

Invariants: on a terminal one live block is redrawn; elsewhere there are few whole lines (phases, validations,
checkpoints, restores and every tenth step), so that a log stays readable; events of an earlier life of a
resumed run are counted and not told again.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Protocol, Self

from rich.console import Console
from rich.live import Live

from protos.headrace.v1 import runs_pb2
from services.cli.output import say
from services.cli.progress import RunView, render
from services.client import AsyncClient
from services.runtime.supervise import ProcessEvent

EVERY_STEPS = 10


class Follower(Protocol):
    """Shows a run."""

    def on_process(self, event: ProcessEvent) -> None:
        """A process of the stack started, became ready, ended."""

    def on_event(self, event: runs_pb2.RunEvent) -> None:
        """The run moved."""

    def on_run(self, run: runs_pb2.Run) -> None:
        """The run's record."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class LineFollower:
    """Plain lines, for logs and pipes."""

    def __init__(self, run: str) -> None:
        self.view = RunView(run)
        self._since = time.time_ns()

    def on_process(self, event: ProcessEvent) -> None:
        """A process of the stack moved."""
        line = self.view.add_process(event)
        if line:
            say(line)

    def on_run(self, run: runs_pb2.Run) -> None:
        """The run's record."""
        self.view.add_run(run)

    def on_event(self, event: runs_pb2.RunEvent) -> None:
        """The run moved."""
        line = self.view.add_event(event)
        dull = event.kind == "publish" or (event.kind == "step" and event.step % EVERY_STEPS)
        if line and not dull and event.at_ns >= self._since:
            say(line)

    def __enter__(self) -> Self:
        say(f"run {self.view.run}")
        return self

    def __exit__(self, *_: object) -> None:
        return


class LiveFollower:
    """One block on a terminal, redrawn; what is worth keeping scrolls above it."""

    def __init__(self, run: str) -> None:
        self.view = RunView(run)
        self._since = time.time_ns()
        self._console = Console(stderr=True, highlight=False)
        self._live = Live(
            console=self._console, get_renderable=lambda: render(self.view), refresh_per_second=4
        )

    def on_process(self, event: ProcessEvent) -> None:
        """A process of the stack moved."""
        line = self.view.add_process(event)
        if line and event.kind == "exited":
            self._console.print(line, markup=False)

    def on_run(self, run: runs_pb2.Run) -> None:
        """The run's record."""
        self.view.add_run(run)

    def on_event(self, event: runs_pb2.RunEvent) -> None:
        """The run moved."""
        line = self.view.add_event(event)
        if line and event.kind in ("validation", "restore", "log") and event.at_ns >= self._since:
            self._console.print(line, markup=False)

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()


def follower(run: str) -> Follower:
    """Whatever suits stderr."""
    return LiveFollower(run) if sys.stderr.isatty() else LineFollower(run)


async def follow(client: AsyncClient, run: str, shown: Follower) -> dict[str, Any]:
    """Show ``run`` until it ends; its summary."""
    shown.on_run(await client.get(run))
    async for event in client.watch(run):
        shown.on_event(event)
        if event.kind == "status":
            shown.on_run(await client.get(run))
    summary: dict[str, Any] = json.loads((await client.get(run)).summary_json)
    return summary
