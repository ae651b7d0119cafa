"""Calls over several channels to replicas of one service, in turn, past those that are down.

Invariants: one call goes to one channel and stays there; which one is decided before anything is sent, so a
call that must not be repeated is not lost to a replica that is known to be down.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

SETTLE_SECONDS = 1.0
_POLL_SECONDS = 0.005
_READY = grpc.ChannelConnectivity.READY
_DOWN = (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN)


class Spread:
    """Chooses among ``channels``."""

    def __init__(self, channels: Sequence[grpc.aio.Channel]) -> None:
        self._channels = channels
        self._turn = itertools.count()

    async def settled(self, seconds: float) -> None:
        """Wait until a channel is ready or all are down, at most ``seconds`` (and never long)."""
        end = time.monotonic() + min(seconds, SETTLE_SECONDS)
        while time.monotonic() < end:
            states = self._states()
            if _READY in states or all(state in _DOWN for state in states):
                return
            await asyncio.sleep(_POLL_SECONDS)

    def choose(self) -> int:
        """Index of the channel for the next call: a ready one, else one that may become ready, else any."""
        states = self._states()
        ready = [i for i, state in enumerate(states) if state is _READY]
        hopeful = [i for i, state in enumerate(states) if state not in _DOWN]
        candidates = ready or hopeful or range(len(states))
        return candidates[next(self._turn) % len(candidates)]

    def _states(self) -> list[grpc.ChannelConnectivity]:
        return [channel.get_state(try_to_connect=True) for channel in self._channels]


class SpreadMethod:
    """One method on every channel; called like one of them."""

    def __init__(self, spread: Spread, methods: Sequence[Any]) -> None:
        self._spread = spread
        self._methods = methods

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Start the call on the channel whose turn it is."""
        return self._methods[self._spread.choose()](*args, **kwargs)
