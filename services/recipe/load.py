"""YAML files and overrides into a checked recipe, with the origin of every key.

Order: ``defaults:`` (relative to the file, depth first, later wins) < the file < overrides (in order); then
interpolation, then types, then the rules between keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from services.recipe.aliases import rename_aliases
from services.recipe.checks import check
from services.recipe.errors import BadKeyError, RecipeError
from services.recipe.interpolate import resolve
from services.recipe.root import Recipe
from services.recipe.schema import nearest
from services.recipe.tree import Leaf, Mapping, find, merge, origin_of, plain
from services.recipe.yaml_tree import parse_text, parse_value


@dataclass(frozen=True, slots=True)
class LoadedRecipe:
    """A recipe and, for each dotted key, where its value came from."""

    recipe: Recipe
    origins: dict[str, str]
    source: str

    @property
    def values(self) -> dict[str, Any]:
        """Dotted key -> value, defaults included."""
        return dict(flat(self.recipe))

    def to_json(self) -> str:
        """What ``Runs.Submit`` carries as ``recipe_json``."""
        return to_json(self.recipe)

    def to_yaml(self) -> str:
        """The resolved recipe as :func:`load_resolved` reads it."""
        return to_yaml(self.recipe)

    def where(self, key: str) -> str:
        """``file:line`` of ``key``, else of the nearest section above it."""
        parts = key.split(".")
        for length in range(len(parts), 0, -1):
            origin = self.origins.get(".".join(parts[:length]), "default")
            if origin != "default":
                return origin
        return self.source


def load(path: str | Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """The recipe at ``path`` with ``KEY=VALUE`` overrides; raises :class:`RecipeError`."""
    return _finish(_overridden(_read(Path(path), ()), overrides), str(path))


def parse(recipe_json: str, source: str = "recipe") -> Recipe:
    """The recipe in a JSON document, as :func:`to_json` writes it; raises :class:`RecipeError`."""
    return from_dict(_json_object(recipe_json, source), source).recipe


def load_resolved(path: Path) -> LoadedRecipe:
    """A recipe as :meth:`LoadedRecipe.to_yaml` wrote it: nothing is interpolated again."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as exc:
        raise RecipeError("The run's recipe cannot be read", where=str(path)) from exc
    return _validated(_from_plain(values, str(path)), str(path))


def from_dict(values: dict[str, Any], source: str = "recipe", overrides: Sequence[str] = ()) -> LoadedRecipe:
    """A recipe given as nested dictionaries; raises :class:`RecipeError`."""
    return _finish(_overridden(rename_aliases(_from_plain(values, source)), overrides), source)


def from_foreign(
    given: str | dict[str, Any], source: str = "recipe", overrides: Sequence[str] = ()
) -> LoadedRecipe:
    """A recipe that somebody else sent, as YAML text or nested dictionaries; raises :class:`RecipeError`.

    It reads nothing of this machine: neither ``defaults`` files nor the environment.
    """
    tree = parse_text(given, source) if isinstance(given, str) else _from_plain(given, source)
    if (found := tree.get("defaults")) is not None:
        raise RecipeError(
            "A submitted recipe stands alone: defaults are files of who wrote it",
            where=found.origin,
            do="Send the whole recipe, or use `headrace submit`.",
        )
    return _finish(_overridden(rename_aliases(tree), overrides), source, environment=False)


def to_json(recipe: Recipe) -> str:
    """``recipe`` as JSON, every key written out."""
    return recipe.model_dump_json()


def to_yaml(recipe: Recipe) -> str:
    """``recipe`` as YAML for people, every key written out."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)


def flat(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key -> value; free mappings and lists are values."""
    for name, field in type(section).model_fields.items():
        value, key = getattr(section, name), prefix + (field.alias or name)
        if isinstance(value, BaseModel):
            yield from flat(value, f"{key}.")
        else:
            yield key, value
    for name, value in (section.model_extra or {}).items():
        yield prefix + name, value


def _read(path: Path, above: tuple[Path, ...]) -> Mapping:
    real = path.resolve()
    if real in above:
        raise RecipeError("defaults go in a circle", where=str(path))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise _unreadable(path, exc, above) from exc
    tree = rename_aliases(parse_text(text, str(path)))
    base = Mapping(str(path))
    for name in _defaults(tree):
        base = merge(base, _read(path.parent / name, (*above, real)))
    return merge(base, tree)


def _unreadable(path: Path, exc: Exception, above: tuple[Path, ...]) -> RecipeError:
    what = "There is no recipe" if isinstance(exc, FileNotFoundError) else "Cannot read recipe"
    where = f"defaults of {above[-1]}" if above else ""
    reason = (
        "" if isinstance(exc, FileNotFoundError) else f": {getattr(exc, 'strerror', None) or 'not UTF-8'}"
    )
    return RecipeError(f"{what} {path}{reason}", where=where, do="Give the path of a YAML file.")


def _defaults(tree: Mapping) -> list[str]:
    found = tree.pop("defaults", None)
    if found is None:
        return []
    value = found.value if isinstance(found, Leaf) else None
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RecipeError("defaults is a path or a list of paths", where=found.origin)
    return names


def _override(text: str) -> Mapping:
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts) or key.strip().startswith("-"):
        raise RecipeError(
            f"{text!r} is no override", where="command line", do="Write KEY=VALUE, as grpo.seed=1."
        )
    leaf: Mapping | Leaf = parse_value(value, "override")
    for part in reversed(parts):
        around = Mapping("override")
        around[part] = leaf
        leaf = around
    assert isinstance(leaf, Mapping)
    return rename_aliases(leaf)


def _overridden(tree: Mapping, overrides: Sequence[str]) -> Mapping:
    for text in overrides:
        tree = merge(tree, _override(text))
    return tree


def _finish(tree: Mapping, source: str, *, environment: bool = True) -> LoadedRecipe:
    return _validated(resolve(tree, environment=environment), source)


def _validated(tree: Mapping, source: str) -> LoadedRecipe:
    try:
        recipe = Recipe.model_validate(plain(tree))
        check(recipe)
    except ValidationError as exc:
        raise _first_error(exc, tree, source) from exc
    except BadKeyError as exc:
        raise RecipeError(exc.message, where=_written(tree, exc.key.split("."), source), do=exc.do) from exc
    return LoadedRecipe(recipe, _origins(recipe, tree), source)


def _origins(recipe: Recipe, tree: Mapping) -> dict[str, str]:
    return {key: origin_of(tree, key.split(".")) for key, _ in flat(recipe)}


def _first_error(exc: ValidationError, tree: Mapping, source: str) -> RecipeError:
    # A misspelt key often makes another one "missing": name the misspelling.
    errors = sorted(exc.errors(), key=lambda error: error["type"] != "extra_forbidden")
    first = errors[0]
    path = [str(part) for part in first["loc"]]
    key, where = ".".join(path), _written(tree, path, source)
    if first["type"] == "extra_forbidden":
        near = nearest(path)
        return RecipeError(f"Unknown key {key}", where=where, do=f"Did you mean {near}?" if near else "")
    if first["type"] == "missing":
        return RecipeError(f"{key} must be set", where=where, do=f"Add it to the recipe, or {key}=VALUE.")
    text = first["msg"].removeprefix("Value error, ")
    return RecipeError(f"{key} is {_short(first['input'])}: {text[:1].lower()}{text[1:]}", where=where)


def _written(tree: Mapping, path: list[str], source: str) -> str:
    for length in range(len(path), 0, -1):
        found = find(tree, path[:length])
        if found is not None:
            return found.origin
    return source


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _from_plain(values: dict[str, Any], origin: str) -> Mapping:
    tree = Mapping(origin)
    for key, value in values.items():
        tree[key] = _from_plain(value, origin) if isinstance(value, dict) else Leaf(value, origin)
    return tree


def _json_object(text: str, source: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as exc:
        raise RecipeError("The recipe is no JSON", where=f"{source}:{exc.lineno}") from exc
    if not isinstance(values, dict):
        raise RecipeError("The recipe is no JSON object", where=source)
    return values
