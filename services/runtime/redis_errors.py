"""Errors of the Redis client in Headrace's tree."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import redis as redis_py

from services.runtime.errors import Exhausted, HeadraceError, Internal, NotReady

_UNREACHABLE = (redis_py.ConnectionError, redis_py.TimeoutError, redis_py.exceptions.BusyLoadingError)


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Raise what the client raises inside the block as an error of the tree."""
    try:
        yield
    except redis_py.RedisError as exc:
        raise translate(exc, where) from exc


def translate(exc: redis_py.RedisError, where: str) -> HeadraceError:
    """Unreachable, loading or slow is NotReady; out of memory is Exhausted; all else is a fault of ours."""
    if isinstance(exc, _UNREACHABLE):
        return NotReady(f"Redis does not answer: {exc}", where=where, do="It is restarted; try again.")
    if isinstance(exc, redis_py.exceptions.OutOfMemoryError) or "OOM " in str(exc):
        return Exhausted("Redis is out of memory", where=where, do="Raise maxmemory, or retire old runs.")
    return Internal(f"Redis refused a command: {exc}", where=where)
