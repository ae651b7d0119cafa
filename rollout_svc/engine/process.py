"""One worker process as its host sees it.

Invariants
- Spawned from the main thread behind the runtime's exec wrapper: it dies with the host, whatever kills that.
- ``ended`` is set exactly once; a setup that is waiting then fails with NotReady: its successor may take it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import sys
import time
from typing import Any

from protos.headrace.v1 import rollout_pb2
from rollout_svc.engine.environment import is_cpu_build, worker_environment
from rollout_svc.engine.lines import ENGINE_ID, EVENTS_FD, Assignment, error_of, info_of
from rollout_svc.engine.settings import EngineSettings
from services.runtime import spawn
from services.runtime.errors import NotReady
from services.runtime.logs import get_logger

LINE_LIMIT = 1 << 20


class WorkerProcess:
    """A worker, from its start to its end; its engine id is unique."""

    def __init__(self, settings: EngineSettings) -> None:
        self.engine = f"engine-{secrets.token_hex(4)}"
        self.assignment: Assignment | None = None
        self.info: rollout_pb2.EngineInfo | None = None
        self.warm = False
        self.ended = asyncio.Event()
        self.started = time.monotonic()
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self._ready: asyncio.Future[rollout_pb2.EngineInfo] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self._log = get_logger("engine")

    @property
    def pid(self) -> int:
        """Process id; 0 before the start."""
        return self._process.pid if self._process is not None else 0

    @property
    def served(self) -> bool:
        """Whether it has served its run."""
        return self._ready.done() and self._ready.exception() is None

    @property
    def failure(self) -> str:
        """Why it has not served, once it has ended."""
        return str(self._ready.exception()) if self._ready.done() else ""

    async def start(self) -> None:
        """Spawn the process; it begins to import at once."""
        reading, writing = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *spawn.wrap([sys.executable, "-m", "rollout_svc.engine.worker"]),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(writing,),
                env=self._environment(writing),
            )
        finally:
            os.close(writing)
        stream = asyncio.StreamReader(limit=LINE_LIMIT)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(reading, "rb"))
        self._tasks = [asyncio.create_task(self._read(stream)), asyncio.create_task(self._reap())]

    async def assign(self, assignment: Assignment) -> rollout_pb2.EngineInfo:
        """Give the worker its run (once) and wait until it serves; raises what ended its start.

        A worker that does not serve in time is ended.
        """
        if self.assignment is None:
            self.assignment = assignment
            await self._write(assignment.line())
        seconds = self._settings.start_seconds or (120.0 if is_cpu_build() else 1800.0)
        try:
            return await asyncio.wait_for(asyncio.shield(self._ready), seconds)
        except TimeoutError:
            self._log.error("worker does not start", engine=self.engine, pid=self.pid, after_s=seconds)
            self._fail(NotReady(f"The engine did not start within {seconds:g} s", do="See its log."))
            await self.stop()
            return await self._ready

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """SIGTERM, a bounded wait, SIGKILL; idempotent. What its turns may take comes on top."""
        process = self._process
        if process is None or self.ended.is_set():
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        seconds = drain_seconds + self._settings.stop_seconds
        try:
            await asyncio.wait_for(self.ended.wait(), seconds)
        except TimeoutError:
            self._log.warning("worker killed", pid=process.pid, after_s=seconds)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await self.ended.wait()

    async def _write(self, line: bytes) -> None:
        assert self._process is not None, "started before it is assigned"
        assert self._process.stdin is not None, "its stdin is a pipe"
        try:
            self._process.stdin.write(line)
            await self._process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError) as exc:
            raise NotReady("The engine's worker has died", do="Repeat the call.") from exc

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while line := await stream.readline():
            self._handle(json.loads(line))

    def _handle(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "warm":
            self.warm = True
            self._log.info(
                "worker warm", engine=self.engine, seconds=round(time.monotonic() - self.started, 2)
            )
        elif kind == "failed":
            self._fail(error_of(event))
        else:
            self.info = info_of(event)
            if kind == "ready" and not self._ready.done():
                self._ready.set_result(self.info)

    async def _reap(self) -> None:
        assert self._process is not None, "reaped after the start"
        status = await self._process.wait()
        # Its last event may still be in the pipe; it is at its end, or will be when the children have gone.
        await asyncio.wait(self._tasks[:1], timeout=1.0)
        level = self._log.info if status == 0 else self._log.warning
        level("worker ended", engine=self.engine, status=status)
        self._fail(NotReady("The engine's worker has died", where=self.engine, do="Repeat the call."))
        self.ended.set()

    def _fail(self, error: Exception) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # nobody may be waiting

    def _environment(self, events: int) -> dict[str, str]:
        env = worker_environment(threads=self._settings.threads)
        prefix = str(self._settings.model_config.get("env_prefix", ""))
        for name, value in self._settings.model_dump(mode="json", exclude_none=True).items():
            env[prefix + name.upper()] = str(value)
        env.pop(prefix + "READY_FILE", None)
        return env | {EVENTS_FD: str(events), ENGINE_ID: self.engine}
