"""``headrace serve gateway``: HTTP, not gRPC; otherwise a service like the others.

Invariants: a signal drains (no new requests, event streams end, requests in flight finish within
``drain_seconds``) and the status is 0; a second one ends the process; bad input is status 2 with one line;
the ready file appears once it answers and goes with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from services.gateway.app import create_app
from services.gateway.settings import GatewaySettings
from services.runtime import auth, logs, tracing
from services.runtime.errors import HeadraceError, Internal, InvalidInput
from services.runtime.home import write_atomic
from services.runtime.ports import port_in_use
from services.runtime.settings import split_address

STOP_SECONDS = 5.0


class Gateway(uvicorn.Server):
    """uvicorn without its own handling of signals: it would end the process by the signal."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them to :func:`serve`."""
        yield


async def serve(settings: GatewaySettings, ended: asyncio.Event) -> None:
    """Serve until ``ended``, then drain. Raises InvalidInput when the port is taken."""
    log = logs.get_logger("gateway")
    app = create_app(settings)
    with _bound(settings) as listening:
        server = Gateway(_config(app, settings))
        running = asyncio.create_task(server.serve(sockets=[listening]))
        address = _address(listening)
        await _started(server, running)
        log.info("serving", address=address, pid=os.getpid())
        if settings.ready_file is not None:
            write_atomic(settings.ready_file, json.dumps({"address": address, "pid": os.getpid()}))
        waiting = asyncio.create_task(ended.wait())
        await asyncio.wait([waiting, running], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        app.state.streams.close()
        server.should_exit = True
        await asyncio.wait([running], timeout=settings.drain_seconds + STOP_SECONDS)
        if settings.ready_file is not None:
            settings.ready_file.unlink(missing_ok=True)
        log.info("stopped")


def main() -> int:
    """``headrace serve gateway``; the exit status."""
    try:
        settings = GatewaySettings.load()
        logs.configure("gateway", level=settings.log_level, file=settings.log_file)
        tracing.setup("gateway", settings.home)
        for doubt in auth.doubts():
            logs.get_logger("gateway").warning(doubt)
        asyncio.run(_until_signalled(settings))
    except HeadraceError as exc:
        print(f"gateway: {exc}", file=sys.stderr)
        return 2 if isinstance(exc, InvalidInput) else 1
    finally:
        tracing.flush()
    return 0


async def _until_signalled(settings: GatewaySettings) -> None:
    ended = asyncio.Event()

    def on_signal() -> None:
        if ended.is_set():
            os._exit(130)
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    await serve(settings, ended)


def _config(app: FastAPI, settings: GatewaySettings) -> uvicorn.Config:
    return uvicorn.Config(
        app, log_config=None, access_log=False, server_header=False, lifespan="on", ws="none",
        timeout_graceful_shutdown=max(1, round(settings.drain_seconds)), timeout_keep_alive=30,
    )  # fmt: skip


def _bound(settings: GatewaySettings) -> socket.socket:
    host, port = split_address(settings.listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if settings.port_handed_over:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listening.bind((host, port))
        listening.listen(1024)
    except OSError as exc:
        listening.close()
        raise port_in_use(host, port) from exc
    return listening


def _address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _started(server: uvicorn.Server, running: asyncio.Task[None]) -> None:
    # uvicorn has no event for it.
    while not server.started:
        if running.done():
            raise Internal("The gateway did not start", where="gateway", do="See its log.")
        await asyncio.sleep(0.01)


if __name__ == "__main__":
    raise SystemExit(main())
