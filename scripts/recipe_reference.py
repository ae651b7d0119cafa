"""Writes the table of recipe keys in docs/recipes.md from the recipe's own models.

    python -m scripts.recipe_reference write    rewrite the part between the two markers
    python -m scripts.recipe_reference check    status 1 when the page is stale

Invariant: every key of every section stands in the page with its type, its default and what it means, as the
models say it; nothing between the markers is written by hand.
"""

from __future__ import annotations

import json
import re
import sys
import types
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from services.recipe.not_built import NO_EFFECT, switches
from services.recipe.root import Recipe
from services.recipe.schema import keys_of, section_of
from services.recipe.section import Section

PAGE = Path(__file__).resolve().parents[1] / "docs" / "recipes.md"
BEGIN, END = "<!-- keys: written by `make docs` -->", "<!-- end of keys -->"
_SIGNS = {Ge: "≥", Gt: ">", Le: "≤", Lt: "<"}


def reference() -> str:
    """The Markdown of all sections."""
    return "\n".join(_section("", Recipe))


def _section(path: str, section: type[Section]) -> Iterator[str]:
    fields = keys_of(section)
    values = {key: field for key, field in fields.items() if section_of(field) is None}
    yield f"### `{path}`" if path else "### Top level"
    yield ""
    if section.__doc__:
        yield _prose(section.__doc__)
        yield ""
    if values:
        yield "| key | type | default | |"
        yield "|---|---|---|---|"
        for key, field in values.items():
            dotted = f"{path}.{key}" if path else key
            yield f"| `{key}` | {_type(field)} | {_default(field)} | {_meaning(dotted, field)} |"
        yield ""
    for key, field in fields.items():
        below = section_of(field)
        if below is not None:
            yield from _section(f"{path}.{key}" if path else key, below)


def _meaning(dotted: str, field: FieldInfo) -> str:
    text = _prose(field.description or "")
    if dotted in NO_EFFECT:
        return f"{text} *Read, and without effect for now.*".strip()
    built = switches().get(dotted)
    if built is None:
        return text
    allowed = ", ".join(f"`{json.dumps(value)}`" for value in built)
    return f"{text} *Built for now: {allowed}.*".strip()


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    return f"`{_cell(json.dumps(_plain(field.default)))}`"


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _type(field: FieldInfo) -> str:
    limits = [_limit(entry) for entry in field.metadata]
    return _cell(" ".join([_name(field.annotation), *filter(None, limits)]))


def _name(annotation: Any) -> str:
    origin, options = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [_limit(entry) for entry in getattr(options[1], "metadata", [])]
        return " ".join([_name(options[0]), *filter(None, inner)])
    if origin in (Union, types.UnionType):
        return " or ".join(_name(option) for option in options)
    if origin is Literal:
        return " or ".join(f"`{option}`" for option in options)
    if origin is list:
        return f"list of {_name(options[0])}"
    if origin is dict:
        return "mapping"
    return {type(None): "null", str: "text", Any: "anything"}.get(annotation, str(annotation.__name__))


def _limit(entry: Any) -> str:
    found = [f"{sign} {_bound(entry, kind)}" for kind, sign in _SIGNS.items() if isinstance(entry, kind)]
    return "".join(found)


def _bound(entry: object, kind: type) -> object:
    """The bound of a limit: the attribute that has the limit's own name."""
    return getattr(entry, kind.__name__.lower())


def _prose(text: str) -> str:
    return _cell(re.sub(r"``([^`]+)``", r"`\1`", re.sub(r":\w+:`([^`]+)`", r"`\1`", " ".join(text.split()))))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def rendered(page: str) -> str:
    """``page`` with its keys brought up to date; raises ValueError when the markers are missing."""
    before, found, rest = page.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"{PAGE} has no markers {BEGIN} … {END}")
    return f"{before}{BEGIN}\n\n{reference()}\n{END}{after}"


def main(argv: list[str]) -> int:
    """See the module's docstring."""
    page = PAGE.read_text(encoding="utf-8")
    fresh = rendered(page)
    if argv == ["write"]:
        PAGE.write_text(fresh, encoding="utf-8")
        return 0
    if argv == ["check"]:
        if fresh != page:
            print("docs/recipes.md is stale: run `make docs`", file=sys.stderr)
        return int(fresh != page)
    print("usage: python -m scripts.recipe_reference write|check", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
