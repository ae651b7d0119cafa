"""``${...}`` in values: other keys (``${grpo.seed}``, relative ``${.seed}``), ``${env:NAME,default}``, and
arithmetic (``${mul:${grpo.num_prompts_per_step},8}``; add, mul, div, max).

Invariants: a value that is one expression keeps the type of what it names; nothing is evaluated but the
forms above; a circle is refused.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from services.recipe.errors import RecipeError
from services.recipe.schema import default_at
from services.recipe.tree import Leaf, Mapping, find, plain
from services.recipe.yaml_tree import parse_value

_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_ARITHMETIC: dict[str, Callable[[Sequence[Any]], Any]] = {
    "add": sum,
    "mul": math.prod,
    "div": lambda numbers: numbers[0] / numbers[1],
    "max": max,
}


_SECRETS = ("HEADRACE_TOKEN", "HEADRACE_TOKEN_FILE")


class _Resolver:
    """Resolves the expressions of one tree."""

    def __init__(self, tree: Mapping, environment: bool) -> None:
        self._tree = tree
        self._may_read_environment = environment
        self._open: list[str] = []

    def value(self, value: Any, path: list[str], origin: str) -> Any:
        """``value``, found at ``path``, with its expressions replaced."""
        if isinstance(value, str):
            return self._text(value, path, origin)
        if isinstance(value, list):
            return [self.value(item, path, origin) for item in value]
        if isinstance(value, dict):
            return {key: self.value(item, path, origin) for key, item in value.items()}
        return value

    def _text(self, text: str, path: list[str], origin: str) -> Any:
        while match := _INNERMOST.search(text):
            found = self._expression(match.group(1).strip(), path, origin)
            if match.span() == (0, len(text)):
                return found
            text = text[: match.start()] + _as_text(found) + text[match.end() :]
        return text

    def _expression(self, inner: str, path: list[str], origin: str) -> Any:
        name, colon, rest = inner.partition(":")
        if colon and name in ("env", "oc.env"):
            if not self._may_read_environment:
                raise RecipeError(
                    "A submitted recipe cannot read the environment of who receives it",
                    where=origin,
                    do="Write the value.",
                )
            return _environment(rest, origin)
        if colon and name in _ARITHMETIC:
            return _calculate(name, rest, origin)
        if colon:
            raise RecipeError(
                f"Unknown resolver ${{{name}:...}}", where=origin, do="Known: env, add, mul, div, max."
            )
        return self._key(inner, path, origin)

    def _key(self, name: str, path: list[str], origin: str) -> Any:
        target = _absolute(name, path)
        dotted = ".".join(target)
        if dotted in self._open:
            raise RecipeError(f"${{{name}}} refers to itself", where=origin)
        found = find(self._tree, target)
        if found is None:
            return self._default(target, name, origin)
        self._open.append(dotted)
        try:
            return self.value(plain(found), target, found.origin)
        finally:
            self._open.pop()

    def _default(self, target: list[str], name: str, origin: str) -> Any:
        try:
            return default_at(target)
        except KeyError:
            raise RecipeError(f"${{{name}}} names no key", where=origin) from None


def resolve(tree: Mapping, *, environment: bool = True) -> Mapping:
    """``tree`` with every expression replaced; origins stay.

    Without ``environment``, as for a recipe that somebody else sent, ``${env:...}`` is refused.
    """
    resolver = _Resolver(tree, environment)

    def walk(part: Mapping, path: list[str]) -> Mapping:
        done = Mapping(part.origin)
        for key, value in part.items():
            here = [*path, key]
            if isinstance(value, Leaf):
                done[key] = Leaf(
                    _given(resolver.value(value.value, here, value.origin), here, value), value.origin
                )
            else:
                done[key] = walk(value, here)
        return done

    return walk(tree, [])


def _given(value: Any, path: list[str], leaf: Leaf) -> Any:
    if value == "???":
        key = ".".join(path)
        raise RecipeError(f"{key} must be set", where=leaf.origin, do=f"Add {key}=VALUE to the command.")
    return value


def _absolute(name: str, path: list[str]) -> list[str]:
    if not name.startswith("."):
        return name.split(".")
    word = name.lstrip(".")
    return [*path[: len(path) - (len(name) - len(word))], *word.split(".")]


def _environment(rest: str, origin: str) -> Any:
    name, comma, default = rest.partition(",")
    if name.strip() in _SECRETS:
        raise RecipeError(f"{name.strip()} has no place in a recipe: recipes are kept", where=origin)
    found = os.environ.get(name.strip())
    if found is None and not comma:
        raise RecipeError(
            f"Environment variable {name.strip()} is not set",
            where=origin,
            do=f"Set it, or write ${{env:{name.strip()},DEFAULT}}.",
        )
    parsed = parse_value(default.strip() if found is None else found, origin)
    return plain(parsed)


def _calculate(name: str, rest: str, origin: str) -> Any:
    try:
        return _ARITHMETIC[name]([_number(part) for part in rest.split(",")])
    except (ValueError, IndexError, ZeroDivisionError) as exc:
        raise RecipeError(f"Cannot compute ${{{name}:{rest}}}", where=origin) from exc


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)
