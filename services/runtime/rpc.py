"""Channels and stubs: every call has a deadline, a trace context and the ids of its work.

Invariants
- A call's deadline is the caller's ``timeout``, else the method's proto option, else 30 s.
- Only methods that the contract marks idempotent are retried, only on UNAVAILABLE, never past the deadline
  and, for streams, never after the first message.
- Whatever fails arrives as an error of :mod:`services.runtime.errors`.
- An address may be several (see :mod:`services.runtime.targets`): calls go round those that are up; a stream
  stays where it began; a retry may meet another replica.
- Channels belong to the event loop that made them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Self, TypeVar
from weakref import WeakKeyDictionary

import grpc
import grpc.aio

from services.runtime.calls import StreamStream, StreamUnary, Target, UnaryStream, UnaryUnary
from services.runtime.retry import RetryBudget
from services.runtime.spread import Spread, SpreadMethod
from services.runtime.targets import targets

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
Stub = TypeVar("Stub")

_channels: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, HeadraceChannel]] = WeakKeyDictionary()


def channel_options() -> list[tuple[str, str | int]]:
    """gRPC options of every client channel."""
    return [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_metadata_size", 64 * 1024),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # A restarted service must be found again within a second, not after gRPC's default of up to 120 s.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.enable_retries", 0),
        # A proxy for the internet has no business between two services.
        ("grpc.enable_http_proxy", 0),
    ]


class HeadraceChannel(grpc.aio.Channel):
    """A channel whose calls keep this module's invariants; generated stubs take it as any other."""

    def __init__(self, address: str, name: str) -> None:
        self._all = [
            grpc.aio.insecure_channel(target.name, options=[*channel_options(), *target.options])
            for target in targets(address)
        ]
        self._inner = self._all[0]
        spread = Spread(self._all) if len(self._all) > 1 else None
        self._target = Target(name=name, address=address, budget=RetryBudget(), spread=spread)

    async def close(self, grace: float | None = None) -> None:
        """Close the connections; calls in flight get ``grace`` seconds."""
        await asyncio.gather(*(channel.close(grace) for channel in self._all))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Connectivity now, of the first target where there are several."""
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Return once the connectivity differs."""
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Return once connected; the caller bounds it."""
        await self._inner.channel_ready()

    def _method(self, shape: str, *args: Any, **kwargs: Any) -> Any:
        methods = [getattr(channel, shape)(*args, **kwargs) for channel in self._all]
        return methods[0] if self._target.spread is None else SpreadMethod(self._target.spread, methods)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """For generated stubs."""
        return UnaryUnary(self._target, method, self._method("unary_unary", method, *args, **kwargs))

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """For generated stubs."""
        return UnaryStream(self._target, method, self._method("unary_stream", method, *args, **kwargs))

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """For generated stubs."""
        return StreamUnary(self._target, method, self._method("stream_unary", method, *args, **kwargs))

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """For generated stubs."""
        return StreamStream(self._target, method, self._method("stream_stream", method, *args, **kwargs))


def connect(address: str, *, name: str) -> HeadraceChannel:
    """A channel to the service ``name`` at ``address``, owned by the caller. Connects on first use.

    ``address`` is HOST:PORT, several with commas between, or a name with several records.
    """
    return HeadraceChannel(address, name)


def stub(cls: Callable[[grpc.aio.Channel], Stub], address: str, *, name: str) -> Stub:
    """A stub of ``cls`` over this event loop's shared channel to ``address``."""
    channels = _channels.setdefault(asyncio.get_running_loop(), {})
    if address not in channels:
        channels[address] = connect(address, name=name)
    return cls(channels[address])


async def close_channels() -> None:
    """Close the channels that :func:`stub` opened on this event loop."""
    for channel in _channels.pop(asyncio.get_running_loop(), {}).values():
        await channel.close()


async def collect(stream: AsyncIterator[Any]) -> list[Any]:
    """All messages of a response stream."""
    return [message async for message in stream]
