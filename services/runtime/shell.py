"""What surrounds every handler: gate, ids, trace context, deadline, and errors turned into statuses.

Invariants
- Health and reflection pass untouched; every other call goes through the shell.
- Before the service has started, calls are answered NOT_READY (UNAVAILABLE), so that clients try again.
- A call without a deadline gets its method's default; none can run for ever.
- What a handler raises reaches the client as one status; what is no HeadraceError is logged with its
  traceback and becomes Internal.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, NoReturn

import grpc
import grpc.aio
from opentelemetry.trace import SpanKind

from services.runtime import tracing
from services.runtime.errors import HeadraceError, Internal, NotReady, TimedOut, from_rpc_error, to_status
from services.runtime.ids import bind_ids, ids_from_metadata
from services.runtime.logs import get_logger
from services.runtime.methods import method_policy

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class Shell(grpc.aio.ServerInterceptor):
    """The one interceptor of a Headrace server; counts the calls in flight."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._log = get_logger(service)
        self.open = False
        """Whether handlers may run."""
        self.in_flight = 0

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith("/grpc."):
            return handler
        return self._wrap(handler, method)

    def _wrap(self, handler: Any, method: str) -> Any:
        streams = handler.request_streaming, handler.response_streaming
        factory, behaviour = {
            (False, False): (grpc.unary_unary_rpc_method_handler, handler.unary_unary),
            (False, True): (grpc.unary_stream_rpc_method_handler, handler.unary_stream),
            (True, False): (grpc.stream_unary_rpc_method_handler, handler.stream_unary),
            (True, True): (grpc.stream_stream_rpc_method_handler, handler.stream_stream),
        }[streams]
        wrapped = (
            self._generator(behaviour, method)
            if inspect.isasyncgenfunction(behaviour)
            else self._coroutine(behaviour, method)
        )
        return factory(
            wrapped,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _coroutine(self, behaviour: Any, method: str) -> Any:
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                with self._around(method, context):
                    async with asyncio.timeout(_seconds(method, context)):
                        return await behaviour(request, context)
            except Exception as exc:
                await self._abort(exc, method, context)

        return call

    def _generator(self, behaviour: Any, method: str) -> Any:
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            messages = behaviour(request, context)
            try:
                with self._around(method, context):
                    async with contextlib.aclosing(messages):
                        async for message in _until(messages, _seconds(method, context)):
                            yield message
            except Exception as exc:
                await self._abort(exc, method, context)

        return call

    @contextlib.contextmanager
    def _around(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> Iterator[None]:
        if not self.open:
            raise NotReady("The service is not up", where=self._service, do="Try again shortly.")
        metadata = [(str(key), value) for key, value in context.invocation_metadata() or ()]
        parent = tracing.context_from(_text(metadata, "traceparent"))
        self.in_flight += 1
        try:
            bind_ids(**ids_from_metadata(metadata))  # the call's own task: nothing to restore
            if parent is None:
                yield
                return
            with tracing.span(method.strip("/"), parent=parent, kind=SpanKind.SERVER):
                yield
        finally:
            self.in_flight -= 1

    async def _abort(
        self, exc: Exception, method: str, context: grpc.aio.ServicerContext[Any, Any]
    ) -> NoReturn:
        if isinstance(exc, grpc.aio.AbortError):
            raise exc
        error = self._as_error(exc, method)
        status = to_status(error)
        await context.abort(status.code, status.details, status.trailing_metadata)
        raise AssertionError("abort returned")

    def _as_error(self, exc: Exception, method: str) -> HeadraceError:
        where = f"{self._service}, {method.rpartition('/')[2]}"
        if isinstance(exc, HeadraceError):
            exc.where = exc.where or where
            return exc
        if isinstance(exc, TimeoutError):
            return TimedOut("The call ran past its deadline", where=where)
        if isinstance(exc, grpc.aio.AioRpcError):
            return from_rpc_error(exc, where=where)
        self._log.error("handler failed", method=method, exc_info=exc)
        return Internal(
            f"{type(exc).__name__}: {exc}", where=where, do=f"See the log of the {self._service} service."
        )


def _seconds(method: str, context: grpc.aio.ServicerContext[Any, Any]) -> float:
    left = context.time_remaining()
    return method_policy(method).deadline if left is None else left


def _text(metadata: list[tuple[str, str | bytes]], key: str) -> str:
    return next((value for name, value in metadata if name == key and isinstance(value, str)), "")


async def _until(messages: AsyncIterator[Any], seconds: float) -> AsyncIterator[Any]:
    # One timeout per message, up to a common end: a timeout must not stay armed across a yield.
    end = asyncio.get_running_loop().time() + seconds
    while True:
        try:
            async with asyncio.timeout_at(end):
                message = await anext(messages)
        except StopAsyncIteration:
            return
        yield message
