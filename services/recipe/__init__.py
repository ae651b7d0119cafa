"""The typed recipe: what a run is, and nothing about how it is carried out.

Imports no other room. :func:`load` reads YAML files and overrides, :func:`parse` the JSON that
``Runs.Submit`` carries; both give a :class:`Recipe` that passed every check, or raise :class:`RecipeError`.
"""

from services.recipe.errors import RecipeError
from services.recipe.load import LoadedRecipe, load, parse
from services.recipe.root import Recipe

__all__ = ["LoadedRecipe", "Recipe", "RecipeError", "load", "parse"]
