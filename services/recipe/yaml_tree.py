"""YAML text into trees with true line numbers.

Invariants: only plain YAML types are constructed (SafeLoader); a key written twice in one mapping is
refused; ``1e-4`` is a number (YAML 1.1 wants ``1.0e-4``, and a learning rate that is a string is a trap).
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from services.recipe.errors import RecipeError
from services.recipe.tree import Leaf, Mapping

_FLOAT = re.compile(r"[-+]?(?:\d[\d_]*)(?:\.[\d_]*)?[eE][-+]?\d+")


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads ``1e-4`` as a number."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))


def parse_text(text: str, source: str) -> Mapping:
    """The tree of a YAML document; raises :class:`RecipeError` naming ``source`` and the line."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return Mapping(source)
        if not isinstance(node, yaml.MappingNode):
            raise RecipeError("A recipe is a mapping of keys", where=f"{source}:{_line(node)}")
        return _mapping(loader, node, source, f"{source}:1")
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        where = f"{source}:{mark.line + 1}" if mark else source
        raise RecipeError(f"Broken YAML: {exc.problem}", where=where) from exc
    finally:
        loader.dispose()


def parse_value(text: str, origin: str) -> Mapping | Leaf:
    """The value of an override, typed as YAML types it; an empty one is null."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if isinstance(node, yaml.MappingNode):
            return _mapping(loader, node, "", origin, fixed_origin=True)
        return Leaf(None if node is None else loader.construct_document(node), origin)
    except yaml.YAMLError as exc:
        raise RecipeError(f"Broken value {text!r}", where=origin, do="Quote it as YAML wants it.") from exc
    finally:
        loader.dispose()


def _mapping(
    loader: _Loader, node: yaml.MappingNode, source: str, origin: str, *, fixed_origin: bool = False
) -> Mapping:
    _refuse_twice(node, source)
    loader.flatten_mapping(node)
    tree = Mapping(origin)
    for key_node, value_node in node.value:
        here = origin if fixed_origin else f"{source}:{_line(key_node)}"
        key = key_node.value
        if isinstance(value_node, yaml.MappingNode):
            tree[key] = _mapping(loader, value_node, source, here, fixed_origin=fixed_origin)
        else:
            tree[key] = Leaf(_construct(loader, value_node), here)
    return tree


def _construct(loader: _Loader, node: yaml.Node) -> Any:
    return loader.construct_object(node, deep=True)


def _refuse_twice(node: yaml.MappingNode, source: str) -> None:
    seen: dict[str, int] = {}
    for key_node, _ in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise RecipeError("A key is a word", where=f"{source}:{_line(key_node)}")
        if key_node.value in seen and key_node.value != "<<":
            raise RecipeError(
                f"Key {key_node.value!r} stands here and in line {seen[key_node.value]}",
                where=f"{source}:{_line(key_node)}",
                do="Keep one of them.",
            )
        seen[key_node.value] = _line(key_node)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
