"""What surrounds every handler: gate, ids, trace context, deadline, and errors turned into statuses.

Invariants
- Health passes untouched. Every other call needs the stack's token where there is one, reflection too; every
  call but these two kinds goes through the shell.
- Before the service has started, calls are answered NOT_READY (UNAVAILABLE), so that clients try again.
- A call without a deadline gets its method's default; none can run for ever.
- What a handler raises reaches the client as one status; what is no HeadraceError is logged with its
  traceback and becomes Internal.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, NoReturn

import grpc
import grpc.aio
from opentelemetry.trace import SpanKind

from services.runtime import auth, metrics, tracing
from services.runtime.errors import (
    HeadraceError,
    Internal,
    NotReady,
    TimedOut,
    Unauthenticated,
    from_rpc_error,
    to_status,
)
from services.runtime.ids import bind_ids, ids_from_metadata
from services.runtime.logs import get_logger
from services.runtime.methods import method_policy

Behaviour = Callable[[Any, Any], Any]
HEALTH = "/grpc.health.v1.Health/"


class Shell(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """The one interceptor of a Headrace server; counts the calls in flight."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._token = auth.token()
        self._log = get_logger(service)
        self._in_flight = 0
        self.open = False
        """Whether handlers may run."""
        self.idle = asyncio.Event()
        """Set while no call is in flight."""
        self.idle.set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Put the shell around the method's handler (gRPC calls this once per call)."""
        method = handler_call_details.method
        if self._token is not None and not method.startswith(HEALTH):
            metadata: Any = handler_call_details.invocation_metadata or ()
            try:
                auth.check(self._token, _header(metadata), where=self._service)
            except Unauthenticated as exc:
                return _refusal(exc)
        handler = await continuation(handler_call_details)
        if handler is None or method.startswith("/grpc."):
            return handler
        return self._wrap(handler, method)

    def _wrap(self, handler: Any, method: str) -> Any:
        factory, behaviour = {
            (False, False): (grpc.unary_unary_rpc_method_handler, handler.unary_unary),
            (False, True): (grpc.unary_stream_rpc_method_handler, handler.unary_stream),
            (True, False): (grpc.stream_unary_rpc_method_handler, handler.stream_unary),
            (True, True): (grpc.stream_stream_rpc_method_handler, handler.stream_stream),
        }[handler.request_streaming, handler.response_streaming]
        if inspect.isasyncgenfunction(behaviour):
            behaviour = _written(behaviour)
        return factory(
            self._around(behaviour, method),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _around(self, behaviour: Behaviour, method: str) -> Behaviour:
        async def call(request: Any, context: Any) -> Any:
            began, code = time.perf_counter(), "OK"
            try:
                with self._entered(method, context):
                    async with asyncio.timeout(_seconds(method, context)):
                        return await behaviour(request, context)
            except grpc.aio.AbortError:
                code = "ABORTED"
                raise
            except asyncio.CancelledError:
                code = "CANCELLED"
                raise
            except Exception as exc:  # noqa: BLE001 (every error has a status)
                error = self._as_error(exc, method)
                code = error.code.name
                await self._abort(error, context)
            finally:
                took = time.perf_counter() - began
                metrics.rpc_seconds.record(took, {"method": method.lstrip("/"), "code": code})

        return call

    @contextlib.contextmanager
    def _entered(self, method: str, context: Any) -> Iterator[None]:
        if not self.open:
            raise NotReady("The service is not up", where=self._service, do="Try again shortly.")
        metadata = [(str(key), value) for key, value in context.invocation_metadata() or ()]
        parent = tracing.context_from(_text(metadata, "traceparent"))
        bind_ids(**ids_from_metadata(metadata))  # the call has a task of its own: nothing to restore
        self._in_flight += 1
        self.idle.clear()
        try:
            if parent is None:
                yield
                return
            with tracing.span(method.strip("/"), parent=parent, kind=SpanKind.SERVER):
                yield
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self.idle.set()

    async def _abort(self, error: HeadraceError, context: Any) -> NoReturn:
        status = to_status(error)
        await context.abort(status.code, status.details, status.trailing_metadata)
        raise AssertionError("abort always raises")

    def _as_error(self, exc: Exception, method: str) -> HeadraceError:
        where = f"{self._service}, {method.rpartition('/')[2]}"
        if isinstance(exc, HeadraceError):
            exc.where = exc.where or where
            return exc
        if isinstance(exc, TimeoutError):
            return TimedOut(str(exc) or "The call ran out of time", where=where)
        if isinstance(exc, grpc.aio.AioRpcError):
            return from_rpc_error(exc, where=where)
        if (known := _of_redis(exc, where)) is not None:
            return known
        self._log.error("handler failed", method=method, exc_info=exc)
        remedy = f"See the log of the {self._service} service."
        return Internal(f"{type(exc).__name__}: {exc}", where=where, do=remedy)


def _of_redis(exc: Exception, where: str) -> HeadraceError | None:
    """What Redis said, in the tree's words; imports nothing in a service that does not use Redis."""
    if "redis" not in sys.modules:
        return None
    from redis import RedisError

    from services.runtime.redis_errors import translate

    return translate(exc, where) if isinstance(exc, RedisError) else None


def _header(metadata: Iterable[tuple[str, str | bytes]]) -> str | bytes | None:
    return next((value for key, value in metadata if key == auth.HEADER), None)


def _refusal(exc: Unauthenticated) -> Any:
    """A handler that refuses the call before a message is read, whatever its shape."""

    async def refuse(_: Any, context: Any) -> None:
        status = to_status(exc)
        await context.abort(status.code, status.details, status.trailing_metadata)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _written(behaviour: Behaviour) -> Behaviour:
    """A generator handler as a coroutine: one task runs all of it, so that context and timeout hold."""

    async def call(request: Any, context: Any) -> None:
        async with contextlib.aclosing(behaviour(request, context)) as messages:
            async for message in messages:
                await context.write(message)

    return call


def _seconds(method: str, context: Any) -> float:
    left: float | None = context.time_remaining()
    return method_policy(method).deadline if left is None else left


def _text(metadata: list[tuple[str, Any]], key: str) -> str:
    return next((value for name, value in metadata if name == key and isinstance(value, str)), "")
