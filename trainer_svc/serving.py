"""gRPC on a thread and an event loop of its own, so that a busy main thread never delays health or Status.

Invariants: the loop lives as long as the thread; the server is drained before the loop ends; errors at the
start are raised in the thread that started it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from services.runtime.errors import HeadraceError, TimedOut
from services.runtime.server import RunningServer
from services.runtime.service import ServiceApp, start_server
from services.runtime.settings import ServiceSettings

START_SECONDS = 20.0
Result = TypeVar("Result")


class ServingThread:
    """Serves ``app`` until :meth:`begin_stop`, or until the app reports that it cannot go on."""

    def __init__(self, app: ServiceApp, settings: ServiceSettings) -> None:
        self._app = app
        self._settings = settings
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Event | None = None
        self._started: Future[RunningServer] = Future()
        self._thread = threading.Thread(target=self._main, name="grpc", daemon=True)
        self.error: HeadraceError | None = None
        """Why the app could not go on."""
        self.stopped = threading.Event()
        """Set once the server has drained."""

    def start(self) -> str:
        """Serve; returns the address. Raises what the start raised."""
        self._thread.start()
        return self._started.result(START_SECONDS).address

    def begin_stop(self) -> None:
        """Ask for a drain; any thread, returns at once."""
        if self._loop is not None and self._ending is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ending.set)

    def call(self, work: Coroutine[Any, Any, Result], timeout: float) -> Result:
        """Run a coroutine on the serving loop and wait for it; raises TimedOut."""
        assert self._loop is not None, "started"
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout)
        except TimeoutError as exc:
            future.cancel()
            raise TimedOut(f"No answer within {timeout:g} s", where=self._app.name) from exc

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as exc:
            if self._started.done():
                raise
            self._started.set_exception(exc)
        finally:
            self.stopped.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ending = asyncio.Event()
        running = await start_server(self._app, self._settings)
        self._started.set_result(running)
        failure = asyncio.create_task(running.failure())
        ending = asyncio.create_task(self._ending.wait())
        await asyncio.wait([failure, ending], return_when=asyncio.FIRST_COMPLETED)
        if failure.done():
            self.error = failure.result()
        await running.stop()
        failure.cancel()
        ending.cancel()
