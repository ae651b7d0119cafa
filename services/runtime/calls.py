"""One class per gRPC call shape; see :mod:`services.runtime.rpc` for what they promise."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Self

import grpc
import grpc.aio

from services.runtime import auth
from services.runtime.errors import HeadraceError, from_rpc_error
from services.runtime.ids import ids_metadata
from services.runtime.methods import method_policy
from services.runtime.retry import RetryBudget, backoff
from services.runtime.spread import Spread


@dataclass(frozen=True, slots=True)
class Target:
    """The service at the other end; ``spread`` where it has several names."""

    name: str
    address: str
    budget: RetryBudget
    spread: Spread | None = None


class _Call:
    """What all shapes share: the method's policy, metadata, error mapping and the pause before a retry."""

    def __init__(self, target: Target, method: str, inner: Any) -> None:
        self._target = target
        self._method = method
        self._inner = inner

    def _deadline(self, timeout: float | None) -> float:
        seconds = method_policy(self._method).deadline if timeout is None else timeout
        return time.monotonic() + seconds

    async def _settled(self, deadline: float) -> None:
        if self._target.spread is not None:
            await self._target.spread.settled(deadline - time.monotonic())

    def _error(self, exc: grpc.aio.AioRpcError, retries: int = 0) -> HeadraceError:
        where = f"{self._target.name} at {self._target.address}, {self._method.rpartition('/')[2]}"
        error = from_rpc_error(exc, where=where)
        if retries:
            error.details["retries"] = str(retries)
        return error

    async def _may_retry(self, exc: grpc.aio.AioRpcError, attempt: int, deadline: float) -> bool:
        """Wait before the next attempt; False when there must be none."""
        if exc.code() is not grpc.StatusCode.UNAVAILABLE or not method_policy(self._method).idempotent:
            return False
        pause = max(backoff(attempt), self._target.budget.reserve())
        if time.monotonic() + pause >= deadline:
            return False
        await asyncio.sleep(pause)
        return True


def call_metadata(extra: Any = None) -> tuple[tuple[str, str | bytes], ...]:
    """Metadata of an outgoing call: the caller's own, the trace context, the ids and the stack's token."""
    from services.runtime.tracing import current_traceparent

    found: list[tuple[str, str | bytes]] = [*(extra or ()), *ids_metadata(), *auth.call_headers()]
    traceparent = current_traceparent()
    if traceparent:
        found.append(("traceparent", traceparent))
    return tuple(found)


class UnaryUnary(_Call):
    """Request and response; the result is a coroutine."""

    async def __call__(
        self, request: Any, *, timeout: float | None = None, metadata: Any = None, **kwargs: Any
    ) -> Any:
        """Call; raises an error of the tree."""
        deadline = self._deadline(timeout)
        sent = call_metadata(metadata)
        attempt = 0
        while True:
            await self._settled(deadline)
            left = max(0.001, deadline - time.monotonic())
            try:
                return await self._inner(request, timeout=left, metadata=sent, **kwargs)
            except grpc.aio.AioRpcError as exc:
                if not await self._may_retry(exc, attempt, deadline):
                    raise self._error(exc, attempt) from exc
            attempt += 1


class StreamUnary(_Call):
    """A stream of requests and one response; never retried, the stream is spent."""

    async def __call__(
        self, requests: Any, *, timeout: float | None = None, metadata: Any = None, **kwargs: Any
    ) -> Any:
        """Call; raises an error of the tree."""
        deadline = self._deadline(timeout)
        await self._settled(deadline)
        left = max(0.001, deadline - time.monotonic())
        try:
            return await self._inner(requests, timeout=left, metadata=call_metadata(metadata), **kwargs)
        except grpc.aio.AioRpcError as exc:
            raise self._error(exc) from exc


class ResponseStream:
    """Responses of one call: iterate, or ``cancel()`` to end it early (``async with`` does that)."""

    def __init__(self, messages: AsyncIterator[Any]) -> None:
        self._messages = messages
        self.call: Any = None

    def __aiter__(self) -> ResponseStream:
        return self

    async def __anext__(self) -> Any:
        return await anext(self._messages)

    def cancel(self) -> None:
        """End the call now; idempotent."""
        if self.call is not None:
            self.call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()


class UnaryStream(_Call):
    """One request and a stream of responses."""

    def __call__(
        self, request: Any, *, timeout: float | None = None, metadata: Any = None, **kwargs: Any
    ) -> ResponseStream:
        """Start the call; iterating raises errors of the tree."""
        deadline = self._deadline(timeout)
        sent = call_metadata(metadata)

        def start() -> Any:
            left = max(0.001, deadline - time.monotonic())
            return self._inner(request, timeout=left, metadata=sent, **kwargs)

        async def messages() -> AsyncIterator[Any]:
            attempt = 0
            while True:
                await self._settled(deadline)
                stream.call, seen = start(), False
                try:
                    async for message in stream.call:
                        seen = True
                        yield message
                    return
                except GeneratorExit:
                    stream.cancel()
                    raise
                except grpc.aio.AioRpcError as exc:
                    if seen or not await self._may_retry(exc, attempt, deadline):
                        raise self._error(exc, attempt) from exc
                attempt += 1

        stream = ResponseStream(messages())
        return stream


class StreamStream(_Call):
    """Streams both ways; never retried."""

    def __call__(
        self, requests: Any, *, timeout: float | None = None, metadata: Any = None, **kwargs: Any
    ) -> ResponseStream:
        """Start the call; iterating raises errors of the tree."""
        deadline = self._deadline(timeout)
        sent = call_metadata(metadata)

        async def messages() -> AsyncIterator[Any]:
            await self._settled(deadline)
            left = max(0.001, deadline - time.monotonic())
            stream.call = self._inner(requests, timeout=left, metadata=sent, **kwargs)
            try:
                async for message in stream.call:
                    yield message
            except grpc.aio.AioRpcError as exc:
                raise self._error(exc) from exc

        stream = ResponseStream(messages())
        return stream
