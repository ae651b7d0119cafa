"""The program of a verifier process: ``verifier_process.py MEMORY_BYTES``; one request at a time over pipes.

Invariants
- Standard output belongs to the protocol; what a verifier prints goes to standard error.
- The process says ``ready`` once it can take requests; ``warm`` requests import before any time limit runs.
- It ends when its input ends, and is killed by the service when an item takes too long.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import resource
import sys
from typing import Any, BinaryIO

from reward_svc.frames import HEADER, checked, encode
from reward_svc.plugins import load
from reward_svc.verifiers.base import Item, as_score

MAX_ERROR = 1000


def main(argv: list[str]) -> int:
    """Serve until the input ends."""
    _limit(int(argv[0]))
    source = os.fdopen(os.dup(0), "rb")
    sink = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    sink.write(encode({"ready": True}))
    while (request := _read(source)) is not None:
        sink.write(_answer(request))
    return 0


def _limit(memory: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


def _read(source: BinaryIO) -> Any:
    import json

    header = source.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    return json.loads(source.read(checked(HEADER.unpack(header)[0])))


def _answer(request: dict[str, Any]) -> bytes:
    try:
        if "warm" in request:
            _warm(request["warm"])
            return encode({"ready": True})
        score = as_score(_call(request["path"], Item(**request["item"])))
        return encode({"value": score.value, "components": score.components})
    except Exception as exc:  # noqa: BLE001 (a verifier's own errors go back as text)
        return encode({"error": f"{type(exc).__name__}: {exc}"[:MAX_ERROR]})


def _call(path: str, item: Item) -> object:
    result = load(path)(item)
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Any) -> object:
    return await result


def _warm(path: str) -> None:
    module = sys.modules[load(path).__module__]
    warm = getattr(module, "warm", None)
    if callable(warm):
        warm()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
