"""A running gRPC server around one :class:`~services.runtime.service.ServiceApp`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Sequence

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from services.runtime.errors import HeadraceError
from services.runtime.home import write_atomic
from services.runtime.logs import get_logger
from services.runtime.ports import port_in_use
from services.runtime.rpc import MAX_MESSAGE_BYTES
from services.runtime.service import ServiceApp
from services.runtime.settings import ServiceSettings, is_loopback, split_address
from services.runtime.shell import Shell

READINESS_SECONDS = 0.2
# A client looks a name up again when a connection ends (calls on it finish first): so it finds new replicas.
CONNECTION_AGE_MS = 60_000
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def server_options(*, reuse_port: bool, local: bool = True) -> list[tuple[str, int]]:
    """gRPC options of every server; ``local`` for one on loopback."""
    return [
        *([] if local else [("grpc.max_connection_age_ms", CONNECTION_AGE_MS)]),
        ("grpc.so_reuseport", int(reuse_port)),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_metadata_size", 64 * 1024),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
        ("grpc.http2.max_ping_strikes", 0),
    ]


class RunningServer:
    """Owns the server, its health and its readiness polling; ``address`` is where it listens."""

    def __init__(self, app: ServiceApp, settings: ServiceSettings) -> None:
        self.address = ""
        self._app = app
        self._settings = settings
        self._log = get_logger(app.name)
        self._shell = Shell(app.name)
        self._health = HealthServicer()
        self._names: Sequence[str] = ()
        self._wake = asyncio.Event()
        self._failed = asyncio.Event()
        self._error: HeadraceError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: bool | None = None
        self._poller: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        options = server_options(
            reuse_port=settings.port_handed_over, local=is_loopback(split_address(settings.listen)[0])
        )
        self._server = grpc.aio.server(interceptors=[self._shell], options=options)

    async def start(self) -> None:
        """Bind, serve, start the app, then open for calls and write the ready file."""
        self._loop = asyncio.get_running_loop()
        self._app.attach(self)
        self._register()
        try:
            self.address = self._bind()
            await self._health.set("", _SERVING)
            await self._publish(False, "starting")
            await self._server.start()
            await self._app.start()
        except BaseException:
            await self._server.stop(0)
            raise
        self._shell.open = True
        self._poller = asyncio.create_task(self._poll(), name=f"{self._app.name} readiness")
        if self._settings.ready_file is not None:
            write_atomic(self._settings.ready_file, json.dumps({"address": self.address, "pid": os.getpid()}))

    async def stop(self, drain_seconds: float | None = None) -> None:
        """Drain and stop; idempotent, concurrent callers wait for the same drain."""
        if self._stopping is None:
            seconds = self._settings.drain_seconds if drain_seconds is None else drain_seconds
            self._stopping = asyncio.create_task(self._drain(seconds))
        await asyncio.shield(self._stopping)

    async def failure(self) -> HeadraceError:
        """Return the error once the app has reported that it cannot go on."""
        await self._failed.wait()
        assert self._error is not None, "set before the event"
        return self._error

    def readiness_changed(self) -> None:
        """Publish the readiness now; from any thread."""
        self._soon(self._wake.set)

    def failed(self, error: HeadraceError) -> None:
        """The app cannot go on; from any thread. The first report counts."""
        self._error = self._error or error
        self._soon(self._failed.set)

    def _soon(self, action: Callable[[], object]) -> None:
        # A change that is reported while the loop closes needs no publication any more.
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(action)

    def _register(self) -> None:
        self._names = tuple(self._app.register(self._server))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    def _bind(self) -> str:
        host, port = split_address(self._settings.listen)
        shown = f"[{host}]" if ":" in host else host
        try:
            bound = self._server.add_insecure_port(f"{shown}:{port}")
        except RuntimeError as exc:
            raise port_in_use(host, port) from exc
        if bound == 0:
            raise port_in_use(host, port)
        return f"{shown}:{bound}"

    async def _poll(self) -> None:
        while True:
            ready, why = self._readiness()
            await self._publish(ready, why)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), READINESS_SECONDS)
            self._wake.clear()

    def _readiness(self) -> tuple[bool, str]:
        try:
            return self._app.readiness()
        except Exception as exc:  # noqa: BLE001 (it counts as not ready)
            self._log.error("readiness failed", exc_info=exc)
            return False, f"readiness failed: {exc}"

    async def _publish(self, ready: bool, why: str) -> None:
        if ready is self._ready:
            return
        self._ready = ready
        self._log.info("readiness", ready=ready, why=why)
        for name in self._names:
            await self._health.set(name, _SERVING if ready else _NOT_SERVING)

    async def _drain(self, seconds: float) -> None:
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.wait([self._poller])
        await self._publish(False, "draining")
        await self._health.enter_graceful_shutdown()
        # The shell turns new calls away; the server is stopped only once. A second stop beside it would
        # cancel the calls of a server that grpc has freed meanwhile, and crash the process.
        self._shell.open = False
        try:
            async with asyncio.timeout(seconds):
                await self._app.draining()
                # Watchers of the health service never end by themselves, so the shell's own count decides.
                await self._shell.idle.wait()
        except TimeoutError:
            self._log.warning("calls are cut off", after_s=seconds)
        except Exception as exc:  # noqa: BLE001 (the drain goes on)
            self._log.error("draining hook failed", exc_info=exc)
        await self._server.stop(0)
        if self._settings.ready_file is not None:
            self._settings.ready_file.unlink(missing_ok=True)
        await self._app.stop()
        self._app.attach(None)
