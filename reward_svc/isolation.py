"""A pool of killable verifier processes.

Invariants
- A verifier process never outlives the service: it carries a death signal and is killed at close.
- Every item has a time limit, which begins when a ready process has it; a process that is too slow, dies or
  answers nonsense is killed and replaced, and the others go on.
- A process is used again only after a complete answer: whatever interrupts an exchange costs it its life.
- Nothing is started before somebody needs it; results are JSON, nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from typing import Any

from reward_svc.frames import HEADER, checked, encode
from services.runtime.auth import environment_without
from services.runtime.logs import get_logger
from services.runtime.spawn import wrap

START_SECONDS = 60.0
MEMORY_BYTES = 4 * 1024**3


class IsolationError(Exception):
    """An item got no score from its process; the text says why."""


class ItemTimeoutError(IsolationError):
    """The time limit passed and the process was killed."""


class ProcessDiedError(IsolationError):
    """The process ended, or could not be started."""


class PoolBusyError(IsolationError):
    """No process became free in time; the verifier is not to blame."""


class VerifierProcess:
    """One life of one process."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._process: asyncio.subprocess.Process | None = None
        self._warm: set[str] = set()

    @property
    def pid(self) -> int | None:
        """Its process id, while it lives."""
        alive = self._process is not None and self._process.returncode is None
        return self._process.pid if alive and self._process is not None else None

    async def ready(self, path: str) -> None:
        """Start it if need be and import the verifier at ``path``; raises ProcessDiedError."""
        try:
            async with asyncio.timeout(START_SECONDS):
                if self.pid is None:
                    await self._start()
                if path not in self._warm:
                    self._checked(await self._exchange({"warm": path}))
                    self._warm.add(path)
        except BaseException as exc:
            await self.kill()
            if isinstance(exc, TimeoutError):
                text = f"a verifier process was not ready within {START_SECONDS:g} s"
                raise ProcessDiedError(text) from exc
            raise

    async def ask(self, request: dict[str, Any], time_limit: float) -> dict[str, Any]:
        """The answer to ``request``; the process is dead afterwards unless the answer is complete."""
        try:
            async with asyncio.timeout(time_limit):
                return await self._exchange(request)
        except BaseException as exc:
            await self.kill()
            if isinstance(exc, TimeoutError):
                raise ItemTimeoutError(f"took longer than {time_limit:g} s and was killed") from exc
            raise

    async def kill(self) -> None:
        """End it and what it started, at once."""
        process, self._process = self._process, None
        self._warm = set()
        if process is None:
            return
        # Its own group, so that what a verifier has started goes with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()

    async def _start(self) -> None:
        await self.kill()
        argv = wrap([sys.executable, "-m", "reward_svc.verifier_process", str(self._memory)])
        self._process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={**environment_without(), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        await self._read()

    async def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        if process is None or process.stdin is None:
            raise ProcessDiedError("the verifier process is gone")
        try:
            process.stdin.write(encode(request))
            await process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError) as exc:
            raise ProcessDiedError("the verifier process died") from exc
        return await self._read()

    async def _read(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        out = self._process.stdout
        try:
            header = await out.readexactly(HEADER.size)
            answer = json.loads(await out.readexactly(checked(HEADER.unpack(header)[0])))
        except asyncio.IncompleteReadError as exc:
            raise ProcessDiedError("the verifier process died") from exc
        except ValueError as exc:
            raise ProcessDiedError(f"the verifier process broke the protocol: {exc}") from exc
        if not isinstance(answer, dict):
            raise ProcessDiedError("the verifier process broke the protocol")
        return answer

    @staticmethod
    def _checked(answer: dict[str, Any]) -> None:
        if "error" in answer:
            raise IsolationError(str(answer["error"]))


class VerifierPool:
    """``workers`` processes, started when they are first needed."""

    def __init__(self, workers: int, *, memory: int = MEMORY_BYTES) -> None:
        self._all = [VerifierProcess(memory) for _ in range(workers)]
        self._idle: asyncio.Queue[VerifierProcess] = asyncio.Queue()
        for process in self._all:
            self._idle.put_nowait(process)
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = get_logger("reward")

    @property
    def pids(self) -> list[int]:
        """The living processes."""
        return [process.pid for process in self._all if process.pid is not None]

    def warm(self, path: str) -> None:
        """Start the idle processes for ``path``, in the background."""
        idle = [self._idle.get_nowait() for _ in range(self._idle.qsize())]
        for process in idle:
            self._background(process, path)

    async def score(
        self, path: str, item: dict[str, Any], *, time_limit: float, wait: float
    ) -> dict[str, Any]:
        """``{"value", "components"}`` of ``item`` (:meth:`Item.to_json`) by the verifier at ``path``.

        Waits up to ``wait`` seconds for a process. Raises IsolationError.
        """
        process = await self._free(wait)
        try:
            await process.ready(path)
            answer = await process.ask({"path": path, "item": item}, time_limit)
        finally:
            if process.pid is None:
                # A replacement starts now, not when the next item waits for it.
                self._background(process, path)
            else:
                self._idle.put_nowait(process)
        if "value" not in answer:
            raise IsolationError(str(answer.get("error", "the verifier process gave no value")))
        return answer

    async def close(self) -> None:
        """Kill every process."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5.0)
        for process in self._all:
            await process.kill()

    async def _free(self, wait: float) -> VerifierProcess:
        try:
            async with asyncio.timeout(wait):
                return await self._idle.get()
        except TimeoutError as exc:
            raise PoolBusyError(f"no verifier process became free within {wait:g} s") from exc

    def _background(self, process: VerifierProcess, path: str) -> None:
        task = asyncio.create_task(self._prepare(process, path))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _prepare(self, process: VerifierProcess, path: str) -> None:
        try:
            await process.ready(path)
        except (IsolationError, OSError) as exc:
            # The next item of this verifier tries again and gets the error as its own.
            self._log.warning("verifier process not ready", verifier=path, error=str(exc))
        finally:
            self._idle.put_nowait(process)
