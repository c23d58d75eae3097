"""Recipes: a file in; a model, its scores and predictions out. Nothing here imports torch.

To add a recipe, write one file with a subclass of `TabularRecipe` and one of `Reader`, end it with `RECIPE = …`, and
add its name to `NAMES`. Read first:

- `recipe`: what a recipe makes of its data (`Prepared`), and the base of what reads tables for its models (`Reader`);
- `tabular`: `TabularRecipe`, whose hooks all work as they are, and the splits into training and held-out rows;
- `text`: a recipe to begin from; `image` and `temporal` override more.

| files | what is in them |
| --- | --- |
| `training`, `options` | `hotlap train`: every model trained and scored, the best kept, everything written down |
| `time_plan` | `--finish-in`: what of all that fits into the time, and what it went to |
| `profiles` | `--profile`: the time that is expected, and what earlier runs scored |
| `answers`, `calls` | `hotlap predict`, and the same from Python |
| `scores`, `onnx_files` | scores and thresholds, ONNX |
| `tables`, `csv_files`, `parquet_files`, `kinds` | files as tables, whose columns have kinds |
| `checks` | what may be wrong with a table |
| `encoders`, `word_counts` | for `text`: encoders with tokenizers, the TF-IDF baseline |
| `bars`, `indicators` | for `temporal`: bars of prices and their features |
| `lag_features`, `forecast_models` | for `forecast`: features that never look ahead; ridge, scale and blend |
| `product_texts`, `price_features` | for `price`: what the text of a product holds; features of a row |
| `price_models` | for `price`: the scale of prices, the network, the blend |
| `price_pictures` | for `price --pictures`: pictures beside the texts |
| `picture_files` | for `image` and `price`: where pictures lie |
| `networks`, `library_models` | networks built here, and those of transformers without their code |
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from hotlap.core.errors import UsageError, did_you_mean, shown

if TYPE_CHECKING:
    from hotlap.recipes.tabular import TabularRecipe

NAMES = ("forecast", "image", "price", "temporal", "text")


def recipe_named(name: str) -> type[TabularRecipe]:
    """The recipe of this name; UsageError where there is none."""
    if name not in NAMES:
        raise UsageError(f"no recipe is called {shown(name)}{did_you_mean(name, NAMES)}")
    found: type[TabularRecipe] = import_module(f"hotlap.recipes.{name}").RECIPE
    return found
