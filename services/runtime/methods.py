"""What the contract says about one gRPC method: its default deadline and whether it may be retried.

Invariant: both come from the method's proto options, found by path in the default descriptor pool; a method
that is not known there gets ``FALLBACK_SECONDS`` and is never retried.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool

DEADLINE_OPTION = "headrace.v1.deadline_seconds"
FALLBACK_SECONDS = 30.0
_REPEATABLE = (
    descriptor_pb2.MethodOptions.IDEMPOTENT,
    descriptor_pb2.MethodOptions.NO_SIDE_EFFECTS,
)


class MethodPolicy(NamedTuple):
    """``deadline`` in seconds; ``idempotent`` when a repeat has no further effect."""

    deadline: float
    idempotent: bool


@cache
def method_policy(path: str) -> MethodPolicy:
    """The policy of ``/package.Service/Method``."""
    options = _options(path)
    if options is None:
        return MethodPolicy(FALLBACK_SECONDS, False)
    return MethodPolicy(_deadline(options), options.idempotency_level in _REPEATABLE)


def _options(path: str) -> Any:
    service, _, method = path.strip("/").partition("/")
    # Service lookup, because FindMethodByName is not in every protobuf implementation.
    try:
        found = descriptor_pool.Default().FindServiceByName(service)
    except KeyError:
        return None
    descriptor = found.methods_by_name.get(method)
    return None if descriptor is None else descriptor.GetOptions()


def _deadline(options: Any) -> float:
    try:
        extension = descriptor_pool.Default().FindExtensionByName(DEADLINE_OPTION)
    except KeyError:
        return FALLBACK_SECONDS
    seconds = options.Extensions[extension] if options.HasExtension(extension) else 0
    return float(seconds) if seconds else FALLBACK_SECONDS
