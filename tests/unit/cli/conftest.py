"""The recipe tests' small recipe."""

from tests.unit.recipe.conftest import recipe, write

__all__ = ["recipe", "write"]
