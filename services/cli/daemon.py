"""The supervisor of ``headrace up``: ``-m services.cli.daemon FOLDER``, detached from any terminal.

Invariants
- One per folder (exclusive lock), for as long as the stack lives; SIGTERM and SIGINT stop the stack in order.
- What was asked for is in ``spec.json``. A newer one changes the number of gyms and engines; its ``request``
  comes back on the board with how that went.
- Its death leaves nothing behind: it is an ordinary :class:`Supervisor`, with a sweeper.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.cli.board import FAILED, READY, STOPPING
from services.cli.failures import BAD_INPUT, one_line
from services.cli.failures import FAILED as STATUS_FAILED
from services.cli.preflight import HOST, Process, members
from services.cli.roster import SERVICES
from services.cli.stack import Layout, Stack
from services.recipe.stack import Stack as StackSection
from services.runtime.errors import HeadraceError, InvalidInput
from services.runtime.home import Home, StackPaths
from services.runtime.locks import FileLock
from services.runtime.ports import ReservedPort

SCALABLE = ("gym", "engine")
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Spec:
    """What was asked for; ``ports`` is ``default`` or ``free``, ``request`` numbers the askings."""

    stack: StackSection
    ports: str
    request: int

    def to_json(self) -> str:
        """As :func:`read_spec` reads it."""
        return json.dumps(
            {"stack": self.stack.model_dump(mode="json"), "ports": self.ports, "request": self.request}
        )

    def wanted(self) -> dict[str, int]:
        """Processes of the services whose number may change."""
        return {"gym": self.stack.replicas.gym, "engine": self.stack.engines}


def read_spec(path: Path) -> Spec:
    """The spec at ``path``."""
    found: dict[str, Any] = json.loads(path.read_bytes())
    return Spec(StackSection.model_validate(found["stack"]), found["ports"], found["request"])


class Daemon:
    """One stack from its start to its end."""

    def __init__(self, home: Home, paths: StackPaths) -> None:
        self._paths = paths
        self._spec = read_spec(paths.spec)
        layout = Layout(
            paths.name, paths.root, self._spec.stack, members(self._spec.stack, SERVICES, numbered=SCALABLE)
        )
        self._stack = Stack(layout, home, reserved(layout.members, self._spec))
        self._ended = asyncio.Event()

    async def run(self) -> int:
        """The exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ended.set)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        board = self._stack.board
        board.write()
        tasks = [asyncio.create_task(work) for work in (self._stack.keep(self._ready), self._ended.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            error = _error_of(tasks[0])
            board.write(FAILED if error else STOPPING, error)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._stack.stop()
        return STATUS_FAILED if error else 0

    def _ready(self) -> None:
        self._stack.board.write(READY)
        self._scaling = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        """Carry out newer specs."""
        while not self._ended.is_set():
            await asyncio.sleep(POLL_S)
            spec = read_spec(self._paths.spec)
            if spec.request != self._spec.request:
                self._spec = spec
                self._stack.board.notice = {"request": spec.request, "error": await self._scale(spec)}
                self._stack.board.write()

    async def _scale(self, spec: Spec) -> str:
        try:
            for service, count in spec.wanted().items():
                await self._stack.scale(service, count)
        except HeadraceError as exc:
            return one_line(str(exc))
        return ""


def reserved(processes: list[Process] | Any, spec: Spec) -> dict[str, ReservedPort]:
    """A port for each process: the first one of a service has the recipe's or the default one."""
    held: dict[str, ReservedPort] = {}
    try:
        for process in processes:
            held[process.name] = _port(process, spec)
    except BaseException:
        for port in held.values():
            port.close()
        raise
    return held


def _port(process: Process, spec: Spec) -> ReservedPort:
    first = process.name in (process.service, f"{process.service}-0")
    wanted = getattr(spec.stack.ports, process.service, None)
    if wanted is None and spec.ports == "default":
        wanted = SERVICES[process.service].port
    return ReservedPort.explicit(HOST, wanted) if wanted and first else ReservedPort.free(HOST)


def _error_of(task: asyncio.Task[Any]) -> str:
    if not task.done() or task.cancelled() or task.exception() is None:
        return ""
    return one_line(str(task.exception()))


def main() -> int:
    """Keep the stack of the folder that is given."""
    paths = StackPaths(Path(sys.argv[1]))
    home = Home(paths.root.parent.parent)
    with FileLock(paths.lock) as lock:
        try:
            if not lock.try_lock():
                raise InvalidInput(f"Stack {paths.name} is up already", where=str(paths.root))
            return asyncio.run(_run(home, paths))
        except HeadraceError as exc:
            print(one_line(str(exc)), flush=True)
            return BAD_INPUT if isinstance(exc, InvalidInput) else STATUS_FAILED


async def _run(home: Home, paths: StackPaths) -> int:
    return await Daemon(home, paths).run()


if __name__ == "__main__":
    raise SystemExit(main())
