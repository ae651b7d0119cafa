"""Gets the trajectories of a manifest from the buffer.

Invariant: a fetch that breaks off in the middle starts again from nothing (Fetch has no side effects), within
``FETCH_SECONDS``; what comes back are the groups that were asked for, in the same order.
"""

from __future__ import annotations

import asyncio
import time

from protos.headrace.v1 import buffer_pb2, buffer_pb2_grpc
from services.runtime import rpc
from services.runtime.errors import Corrupt, NotReady

FETCH_SECONDS = 300.0
RETRY_SECONDS = 0.5


async def fetch_groups(address: str, manifest: buffer_pb2.Manifest) -> list[buffer_pb2.TrajectoryGroup]:
    """The manifest's groups from the buffer at ``address``; raises Corrupt when others come."""
    ordinals = [group.group for group in manifest.groups]
    request = buffer_pb2.FetchRequest(run=manifest.run, book=manifest.book, groups=ordinals)
    end = time.monotonic() + FETCH_SECONDS
    while True:
        try:
            found = await _fetch(address, request, max(1.0, end - time.monotonic()))
            break
        except NotReady:
            # A buffer that restarts cuts the stream; streams are not retried below once they have begun.
            if time.monotonic() + RETRY_SECONDS > end:
                raise
            await asyncio.sleep(RETRY_SECONDS)
    if [group.group for group in found] != ordinals:
        raise Corrupt(
            f"The buffer sent groups {[group.group for group in found][:8]}, not {ordinals[:8]}",
            where=f"Fetch of step {manifest.step}",
        )
    return found


async def _fetch(
    address: str, request: buffer_pb2.FetchRequest, timeout: float
) -> list[buffer_pb2.TrajectoryGroup]:
    stub: buffer_pb2_grpc.BufferAsyncStub = rpc.stub(buffer_pb2_grpc.BufferStub, address, name="buffer")
    found: list[buffer_pb2.TrajectoryGroup] = []
    parts: list[bytes] = []
    async for chunk in stub.Fetch(request, timeout=timeout):
        parts.append(chunk.data)
        if chunk.last:
            found.append(buffer_pb2.TrajectoryGroup.FromString(b"".join(parts)))
            parts.clear()
    if parts:
        raise Corrupt("The buffer's stream ended inside a group", where="Fetch")
    return found
