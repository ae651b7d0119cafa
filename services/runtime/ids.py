"""Who a piece of work belongs to: run, group and sample, carried by context and by gRPC metadata.

Invariants: ids are plain strings; a missing id is absent, never empty; the three metadata keys below are
the only ones that services use for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Self

KEYS: tuple[str, ...] = ("run", "group", "sample")
METADATA_PREFIX = "headrace-"
_METADATA = {METADATA_PREFIX + key: key for key in KEYS}

_ids: ContextVar[Mapping[str, str]] = ContextVar("headrace_ids", default={})  # noqa: B039 (never mutated)


class BoundIds:
    """Ids bound by :func:`bind_ids`; as a context manager it restores the former ones."""

    def __init__(self, token: Token[Mapping[str, str]]) -> None:
        self._token = token

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        _ids.reset(self._token)


def bind_ids(
    *, run: str | None = None, group: str | None = None, sample: str | int | None = None
) -> BoundIds:
    """Add the given ids to the current context; effective at once, restored when used with ``with``."""
    given = {"run": run, "group": group, "sample": sample}
    added = {key: str(value) for key, value in given.items() if value is not None}
    return BoundIds(_ids.set({**_ids.get(), **added}))


def current_ids() -> Mapping[str, str]:
    """The ids of the current context; do not modify."""
    return _ids.get()


def ids_metadata() -> list[tuple[str, str]]:
    """The current ids as gRPC metadata."""
    return [(METADATA_PREFIX + key, value) for key, value in _ids.get().items()]


def ids_from_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    """The ids that a caller sent."""
    return {_METADATA[key]: str(value) for key, value in metadata if key in _METADATA and value}
