"""What keys a recipe can have, read off the models: for defaults, for the nearest known key, for the plan."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator
from typing import Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from services.recipe.root import Recipe
from services.recipe.section import Section


def keys_of(section: type[Section]) -> dict[str, FieldInfo]:
    """Key as written in YAML -> field."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section that a field holds; None for a value, a list or a free mapping."""
    annotation = field.annotation
    options = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    for option in options:
        if isinstance(option, type) and issubclass(option, Section):
            return option
    return None


def section_at(path: list[str]) -> type[Section] | None:
    """The section at a dotted path of sections; None when the path leaves them."""
    section: type[Section] = Recipe
    for part in path:
        field = keys_of(section).get(part)
        below = None if field is None else section_of(field)
        if below is None:
            return None
        section = below
    return section


def known_keys(section: type[Section] = Recipe, prefix: str = "") -> Iterator[str]:
    """Every dotted key, sections included."""
    for key, field in keys_of(section).items():
        yield prefix + key
        below = section_of(field)
        if below is not None:
            yield from known_keys(below, f"{prefix}{key}.")


def default_at(path: list[str]) -> Any:
    """The default value of a dotted key; raises KeyError when it has none."""
    section = section_at(path[:-1])
    field = None if section is None else keys_of(section).get(path[-1])
    if field is None or field.is_required():
        raise KeyError(".".join(path))
    return field.get_default(call_default_factory=False)


def nearest(path: list[str]) -> str | None:
    """The known dotted key that an unknown one most likely means: a sibling, else the same word elsewhere."""
    word, parent = path[-1], path[:-1]
    section = section_at(parent)
    siblings = list(keys_of(section)) if section is not None else []
    close = difflib.get_close_matches(word, siblings, n=1, cutoff=0.6)
    if close:
        return ".".join([*parent, close[0]])
    everywhere = {key.rpartition(".")[2]: key for key in reversed(list(known_keys()))}
    close = difflib.get_close_matches(word, everywhere, n=1, cutoff=0.75)
    if close:
        return everywhere[close[0]]
    close = difflib.get_close_matches(word, siblings, n=1, cutoff=0.0)
    return ".".join([*parent, close[0]]) if close else None
