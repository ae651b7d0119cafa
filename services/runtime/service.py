"""The bootstrap of every Headrace service.

Invariants
- A service is live (health of ``""``) from the moment that it listens, and *ready* (health of its full gRPC
  names) only while :meth:`ServiceApp.readiness` says so.
- The ready file appears once :meth:`ServiceApp.start` has returned.
- Drain: not ready → no new calls → calls in flight end within ``drain_seconds`` → :meth:`ServiceApp.stop`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import grpc.aio

from services.runtime import auth, logs, metrics, tracing
from services.runtime.errors import HeadraceError, InvalidInput
from services.runtime.settings import ServiceSettings

if TYPE_CHECKING:
    from services.runtime.server import RunningServer


class ServiceHost(Protocol):
    """What an app may tell its server, from any thread."""

    def readiness_changed(self) -> None:
        """Ask for the readiness now."""

    def failed(self, error: HeadraceError) -> None:
        """The service cannot go on."""


class ServiceApp(ABC):
    """One service: what it registers, and its life."""

    name: ClassVar[str]
    measured_here: ClassVar[bool] = True
    """Whether this process has the service's metrics (else a child of it has)."""
    _host: ServiceHost | None = None

    def attach(self, host: ServiceHost | None) -> None:
        """The server that runs the app says who it is (None when it has ended)."""
        self._host = host

    @abstractmethod
    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        """Add the servicers to ``server``; return their full gRPC service names."""

    async def start(self) -> None:  # noqa: B027 (optional hook)
        """Open what the service needs. Calls are answered NOT_READY until it returns."""

    async def draining(self) -> None:  # noqa: B027 (optional hook)
        """The drain begins: end long streams now, so that they do not hold it up."""

    async def stop(self) -> None:  # noqa: B027 (optional hook)
        """Close what :meth:`start` opened; all calls have ended."""

    def readiness(self) -> tuple[bool, str]:
        """Whether the service can do its work now, and why not. Must return at once."""
        return True, ""

    def readiness_changed(self) -> None:
        """Publish the readiness now instead of within 0.2 s; callable from any thread."""
        if self._host is not None:
            self._host.readiness_changed()

    def fail(self, error: HeadraceError) -> None:
        """The service cannot go on: drain and end with status 1, so that a supervisor starts it afresh."""
        if self._host is not None:
            self._host.failed(error)


async def start_server(app: ServiceApp, settings: ServiceSettings) -> RunningServer:
    """Serve ``app`` on the running loop; returns once it is started. Raises InvalidInput on a taken port."""
    from services.runtime.server import RunningServer

    running = RunningServer(app, settings)
    await running.start()
    return running


def serve(app: ServiceApp, settings: ServiceSettings) -> int:
    """Serve until SIGTERM or SIGINT and drain; a second signal ends the process at once.

    Returns the exit status: 0 after a drain, 2 on bad input, 1 on any other failure to start.
    """
    logs.configure(app.name, level=settings.log_level, file=settings.log_file)
    tracing.setup(app.name, settings.home)
    try:
        metrics.setup(app.name, settings.metrics_listen if app.measured_here else "")
        asyncio.run(_serve(app, settings))
    except HeadraceError as exc:
        logs.get_logger(app.name).error("service failed", error=str(exc))
        print(f"{app.name}: {exc}", file=sys.stderr)
        return 2 if isinstance(exc, InvalidInput) else 1
    finally:
        tracing.flush()
        metrics.shutdown()
    return 0


async def _serve(app: ServiceApp, settings: ServiceSettings) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if ended.is_set():
            os._exit(130)
        ended.set()

    # Before the start: a signal that arrives meanwhile must lead to a drain too.
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    log = logs.get_logger(app.name)
    for doubt in auth.doubts():
        log.warning(doubt)
    starting = asyncio.create_task(start_server(app, settings))
    if not await _first(starting, ended):
        starting.cancel()
        await asyncio.wait([starting])
        return
    running = starting.result()
    log.info("serving", address=running.address, pid=os.getpid())
    failure = asyncio.create_task(running.failure())
    await _first(failure, ended)
    await running.stop()
    log.info("stopped")
    if failure.done():
        raise failure.result()
    failure.cancel()


async def _first(task: asyncio.Task[Any], event: asyncio.Event) -> bool:
    """Wait for either; whether ``task`` is done."""
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    return task.done()
