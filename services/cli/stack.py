"""A stack: every service as a child process of this one, for one run or for many.

Invariants
- Everything is started at once: the engine and the trainer need seconds to import, the others must not wait.
- Ports are held here, so that a service that is restarted comes back at the same address.
- SIGKILL of this process leaves nothing behind: children carry death signals, Redis has a keeper that leaves
  with its last user, and we are one.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from services.cli.board import Board, Row
from services.cli.preflight import Process, processes
from services.cli.roster import SERVICES, Service
from services.recipe import Recipe
from services.recipe.stack import Stack as StackSection
from services.runtime.errors import NotReady
from services.runtime.home import Home, RunPaths
from services.runtime.ports import ReservedPort
from services.runtime.redis import RedisHandle, acquire
from services.runtime.supervise import ProcessEvent, ProcessSpec, ProcessStatus, Supervisor

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.05
# Those who give work stop before those who do it.
STOP_STAGES = {"controller": 0, "gym": 1}


@dataclass(frozen=True, slots=True)
class Layout:
    """What a stack consists of: ``name`` is the one that its controller takes up runs under, ``root`` holds
    logs and ready files, ``render`` says that engines hold no model."""

    name: str
    root: Path
    settings: StackSection
    members: Sequence[Process]
    render: bool = False

    @classmethod
    def of_run(cls, recipe: Recipe, paths: RunPaths) -> Self:
        """The stack of one ``headrace run``."""
        return cls(paths.run_id, paths.root, recipe.stack, processes(recipe), recipe.kind == "sft")


class Stack:
    """The processes of one layout; use it on the main thread's event loop. ``ports`` are held by name."""

    def __init__(
        self,
        layout: Layout,
        home: Home,
        ports: Mapping[str, ReservedPort],
        on_event: Callable[[ProcessEvent], None] = lambda _: None,
    ) -> None:
        self.layout = layout
        self._home = home
        self._ports = dict(ports)
        self._members = {process.name: process for process in layout.members}
        self._redis: RedisHandle | None = None
        self._on_event = on_event
        self.board = Board(layout.root / "board.json", layout.name, self._rows)
        self._supervisor = Supervisor(
            self._moved,
            max_restarts=layout.settings.max_restarts,
            window_seconds=layout.settings.restart_window_s,
        )

    @property
    def controller(self) -> str:
        """HOST:PORT of the controller."""
        return self._ports["controller"].address

    def status(self) -> list[ProcessStatus]:
        """All processes."""
        return self._supervisor.status()

    async def keep(self, ready: Callable[[], None] = lambda: None) -> None:
        """Start everything, say so, and keep it running until cancelled; raises when it cannot."""
        self._redis = await asyncio.to_thread(acquire, self._home.root, self.layout.settings.redis_url)
        guard = asyncio.create_task(self._redis.guard())
        try:
            await self._supervisor.start_all([self._spec(process) for process in self.layout.members])
            ready()
            await self._supervisor.watch()
        finally:
            guard.cancel()
            await asyncio.gather(guard, return_exceptions=True)

    async def scale(self, service: str, count: int) -> None:
        """Start or stop processes of ``service`` until there are ``count``; the newest leave first.

        Raises NotReady when a new one is not ready in time: it is stopped again. Needs :meth:`keep`.
        """
        present = [process for process in self._members.values() if process.service == service]
        if len(present) > count:
            await self._drop(present[count:])
        free = (f"{service}-{i}" for i in range(10_000) if f"{service}-{i}" not in self._members)
        await self._add([Process(next(free), service) for _ in range(count - len(present))])

    async def _add(self, added: list[Process]) -> None:
        for process in added:
            self._members[process.name] = process
            self._ports[process.name] = ReservedPort.free()
        try:
            await self._supervisor.start_all([self._spec(process) for process in added])
        except NotReady:
            await self._drop(added)
            raise

    async def _drop(self, leaving: list[Process]) -> None:
        await self._supervisor.remove([process.name for process in leaving])
        for process in leaving:
            del self._members[process.name]
            self._ports.pop(process.name).close()
        self.board.write()

    def _moved(self, event: ProcessEvent) -> None:
        self.board.write()
        self._on_event(event)

    def _rows(self) -> list[Row]:
        """The processes as the board shows them."""
        return [
            Row(
                name=status.name,
                service=self._members[status.name].service,
                pid=status.pid if status.running else 0,
                ready=status.ready,
                restarts=status.restarts,
                address=self._ports[status.name].address,
                log=str(self._log(status.name)),
            )
            for status in self._supervisor.status()
            if status.name in self._members
        ]

    async def answering(self, name: str, timeout: float) -> None:
        """Wait until process ``name`` is ready; raises NotReady. :meth:`keep` must be running."""
        waited = 0.0
        while not any(status.name == name and status.ready for status in self.status()):
            if waited > timeout:
                raise NotReady(f"{name} was not ready within {timeout:g} s", where=str(self._log(name)))
            await asyncio.sleep(POLL_S)
            waited += POLL_S

    async def stop(self) -> None:
        """Stop everything in order, then let go of Redis and the ports."""
        try:
            await self._supervisor.stop_all()
        finally:
            self._let_go()

    def kill(self) -> None:
        """Stop everything at once."""
        self._supervisor.kill_all()
        self._let_go()

    def _let_go(self) -> None:
        for port in self._ports.values():
            port.close()
        self.board.remove()
        if self._redis is not None:
            self._redis.close()

    def _log(self, name: str) -> Path:
        return self.layout.root / "logs" / f"{name}.log"

    def _ready_file(self, name: str) -> Path:
        return self.layout.root / "ready" / f"{name}.json"

    def _spec(self, process: Process) -> ProcessSpec:
        stack = self.layout.settings
        timeouts = {"trainer": stack.trainer_start_timeout_s, "engine": stack.engine_start_timeout_s}
        return ProcessSpec(
            name=process.name,
            argv=[sys.executable, "-m", "services.cli.main", "serve", process.service],
            log_file=self._log(process.name),
            env=self._environment(process),
            ready_file=self._ready_file(process.name),
            start_timeout=timeouts.get(process.service, stack.service_start_timeout_s),
            stop_timeout=stack.drain_seconds + 5.0,
            stop_stage=STOP_STAGES.get(process.service, len(STOP_STAGES)),
        )

    def _environment(self, process: Process) -> dict[str, str]:
        service, stack = SERVICES[process.service], self.layout.settings
        settings = {
            "LISTEN": self._ports[process.name].address,
            "PORT_HANDED_OVER": "true",
            "READY_FILE": str(self._ready_file(process.name)),
            "HOME": str(self._home.root),
            "LOG_LEVEL": stack.log_level,
            "DRAIN_SECONDS": f"{stack.drain_seconds:g}",
            **{peer.upper(): self._addresses(peer) for peer in service.peers},
            **self._own_settings(service),
        }
        path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
        found = {"HEADRACE_HOME": str(self._home.root), "PYTHONPATH": path}
        found.update({service.prefix + key: value for key, value in settings.items()})
        return found

    def _own_settings(self, service: Service) -> dict[str, str]:
        """Settings that one service has and the others have not."""
        stack, name = self.layout.settings, service.name
        found = {}
        if service.redis and stack.redis_url is not None:
            found["REDIS_URL"] = stack.redis_url
        if name in ("controller", "buffer"):
            found["STACK"] = self.layout.name
        if name == "engine":
            found["BACKEND"] = "render" if self.layout.render else "vllm"
            if stack.threads.engine is not None:
                found["THREADS"] = str(stack.threads.engine)
        elif name == "gym":
            found["CONCURRENCY"] = str(stack.gym_concurrency)
        elif name == "reward":
            found["WORKERS"] = str(stack.reward_workers)
        elif name == "trainer":
            found["NPROC"] = str(stack.trainer_processes)
            if stack.threads.trainer is not None:
                found["THREADS"] = str(stack.threads.trainer)
        return found

    def _addresses(self, service: str) -> str:
        """The addresses of all replicas of ``service``, commas apart."""
        names = [process.name for process in self.layout.members if process.service == service]
        return ",".join(self._ports[name].address for name in names)
