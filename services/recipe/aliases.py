"""Second names of keys: recipes in circulation use both.

Renamed in each file and each override before they are merged, so that the two names override each other.
"""

from __future__ import annotations

from services.recipe.errors import RecipeError
from services.recipe.tree import Leaf, Mapping, find

# dotted alias -> canonical last word
ALIASES: dict[str, str] = {"policy.dtensor_cfg": "automodel_cfg"}


def rename_aliases(tree: Mapping) -> Mapping:
    """``tree`` with canonical names; the origins of what was renamed say so. Changes ``tree``."""
    for dotted, canonical in ALIASES.items():
        *path, word = dotted.split(".")
        parent = find(tree, path)
        if not isinstance(parent, Mapping) or word not in parent:
            continue
        if canonical in parent:
            raise RecipeError(
                f"{dotted} and {'.'.join([*path, canonical])} are the same section",
                where=parent[word].origin,
                do=f"Use {canonical} only.",
            )
        parent[canonical] = _marked(parent.pop(word), f" (alias {word})")
    return tree


def _marked(part: Mapping | Leaf, suffix: str) -> Mapping | Leaf:
    if isinstance(part, Leaf):
        return Leaf(part.value, part.origin + suffix)
    marked = Mapping(part.origin + suffix)
    for key, value in part.items():
        marked[key] = _marked(value, suffix)
    return marked
