"""All recipes by name."""

from __future__ import annotations

from importlib import import_module

from hotlap.core.errors import UsageError, did_you_mean, shown
from hotlap.recipes.recipe import Recipe

NAMES = ("image", "temporal", "text")


def recipe_named(name: str) -> Recipe:
    """The recipe of this name."""
    if name not in NAMES:
        raise UsageError(f"no recipe is called {shown(name)}{did_you_mean(name, NAMES)}")
    found: Recipe = import_module(f"hotlap.recipes.{name}").RECIPE
    return found
