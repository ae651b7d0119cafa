"""Small facts about policy versions.

Invariant: versions of a run are ordered by (incarnation, number); (0, 0) is the base model, which engines
load from disk and which is never transferred.
"""

from __future__ import annotations

from protos.headrace.v1 import types_pb2

Key = tuple[int, int]
BASE: Key = (0, 0)


def key_of(version: types_pb2.PolicyVersion) -> Key:
    """(incarnation, number)."""
    return version.incarnation, version.number


def text_of(version: types_pb2.PolicyVersion) -> str:
    """For messages: ``version 0.3``."""
    return f"version {version.incarnation}.{version.number}"


def make(key: Key, digest: str = "") -> types_pb2.PolicyVersion:
    """The message of a version."""
    return types_pb2.PolicyVersion(incarnation=key[0], number=key[1], digest=digest)
