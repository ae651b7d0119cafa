"""Recipes as trees of leaves that know where they were written.

Invariants: a mapping is a dict of subtrees, anything else is one :class:`Leaf`; merging keeps the origin of
whichever side won; a mapping with ``_override_: true`` replaces instead of merging.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

OVERRIDE = "_override_"


@dataclass(frozen=True, slots=True)
class Leaf:
    """A scalar or a list, and its origin (``file:line``, ``override``)."""

    value: Any
    origin: str


class Mapping(dict[str, "Mapping | Leaf"]):
    """A mapping that knows where it was written; ``origin`` is that of its key."""

    def __init__(self, origin: str) -> None:
        super().__init__()
        self.origin = origin


def merge(base: Mapping, over: Mapping) -> Mapping:
    """``over`` on top of ``base``; neither is changed."""
    if replaces(over):
        return _without_marker(over)
    merged = Mapping(over.origin)
    merged.update(base)
    for key, value in over.items():
        below = base.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            merged[key] = merge(below, value)
        else:
            merged[key] = _without_marker(value) if isinstance(value, Mapping) else value
    return merged


def replaces(tree: Mapping) -> bool:
    """Whether the mapping asks to replace what is below it."""
    marker = tree.get(OVERRIDE)
    return isinstance(marker, Leaf) and marker.value is True


def _without_marker(tree: Mapping) -> Mapping:
    clean = Mapping(tree.origin)
    for key, value in tree.items():
        if key != OVERRIDE:
            clean[key] = _without_marker(value) if isinstance(value, Mapping) else value
    return clean


def plain(tree: Mapping | Leaf) -> Any:
    """The values without their origins."""
    if isinstance(tree, Leaf):
        return tree.value
    return {key: plain(value) for key, value in tree.items()}


def find(tree: Mapping, path: list[str]) -> Mapping | Leaf | None:
    """The subtree at ``path``; None when there is none."""
    at: Mapping | Leaf = tree
    for part in path:
        if not isinstance(at, Mapping) or part not in at:
            return None
        at = at[part]
    return at


def origin_of(tree: Mapping, path: list[str]) -> str:
    """Origin of the deepest part of ``path`` that was written; ``default`` when none was."""
    for length in range(len(path), 0, -1):
        found = find(tree, path[:length])
        if found is not None:
            return found.origin if length == len(path) or isinstance(found, Leaf) else "default"
    return "default"
