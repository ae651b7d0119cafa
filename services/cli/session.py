"""One life of ``headrace run``: start the stack, submit, follow, stop, report.

Invariant: whatever ends the session (the run, a failure, a signal), the stack is stopped, and a run that is
not done can be resumed.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from services.cli.failures import FAILED, one_line
from services.cli.follow import follow, follower
from services.cli.job import Job
from services.cli.output import say
from services.cli.report import print_summary
from services.cli.stack import Layout, Stack
from services.client import AsyncClient
from services.controller.servicer import new_run_id as new_run
from services.runtime.errors import HeadraceError, InvalidInput

__all__ = ["new_run", "run_session"]

INTERRUPTED = 130


def run_session(job: Job, *, as_json: bool) -> int:
    """Run ``job`` on this (the main) thread; the exit status."""
    return asyncio.run(_Session(job, as_json=as_json).run())


class _Session:
    """Three tasks, of which the first to end decides: the stack, the run, the user's signal."""

    def __init__(self, job: Job, *, as_json: bool) -> None:
        self._job = job
        self._as_json = as_json
        self._follower = follower(job.paths.run_id)
        layout = Layout.of_run(job.loaded.recipe, job.paths)
        self._stack = Stack(layout, job.home, job.ports, self._follower.on_process)
        self._interrupted = asyncio.Event()
        self._summary: dict[str, Any] = {}

    async def run(self) -> int:
        """Everything between the checks and the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        tasks = [asyncio.create_task(work) for work in (self._stack.keep(), self._work(), self._signal())]
        try:
            with self._follower:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            await self._stack.stop()
        return self._outcome(ended)

    def _on_signal(self) -> None:
        if self._interrupted.is_set():
            self._stack.kill()
            os._exit(INTERRUPTED)
        self._interrupted.set()
        say("stopping; once more to kill")

    async def _signal(self) -> None:
        await self._interrupted.wait()

    async def _work(self) -> None:
        """Submit and follow to the end."""
        run, stack = self._job.paths.run_id, self._job.loaded.recipe.stack
        await self._stack.answering("controller", stack.service_start_timeout_s)
        async with AsyncClient(self._stack.controller) as client:
            await client.resume(run, self._job.loaded)
            self._summary = await follow(client, run, self._follower)

    def _outcome(self, ended: list[BaseException | None]) -> int:
        run = self._job.paths.run_id
        if self._summary:
            print_summary(self._summary, as_json=self._as_json)
            return 0 if self._summary["status"] == "completed" else FAILED
        for exc in ended:
            if isinstance(exc, InvalidInput):
                raise exc
            if isinstance(exc, HeadraceError):
                say(f"error: {one_line(str(exc))}")
                say(f"logs: {self._job.paths.logs}; go on with: headrace run --resume {run}")
                return FAILED
            if isinstance(exc, Exception):
                raise exc
        say(f"interrupted; go on with: headrace run --resume {run}")
        return INTERRUPTED
