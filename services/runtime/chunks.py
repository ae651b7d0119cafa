"""Bytes above 512 KB travel as a stream of chunks; the receiver checks the length it was promised.

Invariants: a chunk has 1 to ``CHUNK_BYTES`` bytes; empty data is no chunks at all; joining never buffers
more than the promised length.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Iterator

from services.runtime.errors import Corrupt

CHUNK_BYTES = 512 * 1024


def split(data: bytes | bytearray | memoryview, size: int = CHUNK_BYTES) -> Iterator[bytes]:
    """Yield ``data`` in pieces of at most ``size`` bytes."""
    view = memoryview(data).cast("B")
    for start in range(0, len(view), size):
        yield bytes(view[start : start + size])


class Joiner:
    """Collects chunks of one payload of ``length`` bytes; raises Corrupt on too many or too few."""

    def __init__(self, length: int, *, what: str = "payload") -> None:
        self._data = bytearray(length)
        self._at = 0
        self._what = what

    def add(self, chunk: bytes) -> None:
        """Append one chunk."""
        end = self._at + len(chunk)
        if end > len(self._data):
            raise Corrupt(f"{self._what} is longer than its {len(self._data)} promised bytes")
        self._data[self._at : end] = chunk
        self._at = end

    def finish(self) -> bytearray:
        """The payload, once all of it is there (a buffer that NumPy can view without a copy)."""
        if self._at != len(self._data):
            raise Corrupt(f"{self._what} ended after {self._at} of {len(self._data)} promised bytes")
        return self._data


def join(chunks: Iterable[bytes], length: int, *, what: str = "payload") -> bytearray:
    """Join ``chunks`` to exactly ``length`` bytes."""
    joiner = Joiner(length, what=what)
    for chunk in chunks:
        joiner.add(chunk)
    return joiner.finish()


async def join_stream(chunks: AsyncIterable[bytes], length: int, *, what: str = "payload") -> bytearray:
    """Join a stream of ``chunks`` to exactly ``length`` bytes."""
    joiner = Joiner(length, what=what)
    async for chunk in chunks:
        joiner.add(chunk)
    return joiner.finish()
