"""Recipes by a call: what `hotlap train` and `hotlap predict` do, from Python."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from hotlap.core.terminal import say
from hotlap.recipes import recipe_named, training
from hotlap.recipes.answers import Model, answer
from hotlap.recipes.options import options_of
from hotlap.recipes.recipe import Say, only_warnings


def train(
    recipe: str,
    data: str | PathLike[str],
    *,
    out: str | PathLike[str] | None = None,
    retrain: bool = False,
    progress: bool = True,
    **options: Any,
) -> Path:
    """Train a recipe (as "text" or "price") on a file or folder, and give the folder of its run.

    The options are those that `hotlap recipes NAME` lists, as `target="label"`. With `retrain` it is trained again,
    were it in the cache; without `progress` only warnings are shown, on stderr. Raises HotlapError where options or
    data will not do.
    """
    chosen = recipe_named(recipe)
    words = {name: str(value) if isinstance(value, PathLike) else value for name, value in options.items()}
    given = options_of(chosen.options_type, None, {"data": str(data), **words})
    folder = None if out is None else Path(out)
    return training.train(chosen, given, out=folder, retrain=retrain, say=_say(progress), progress=progress)


def predict(
    run: str | PathLike[str],
    data: str | PathLike[str],
    out: str | PathLike[str],
    *,
    keep: Sequence[str] = (),
    probabilities: bool = False,
    embeddings: str | PathLike[str] | None = None,
    device: str = "auto",
    progress: bool = True,
) -> int:
    """Write what the model of a run answers for each row of a file, and give the number of rows answered.

    `out` is a new CSV or Parquet file: the columns of `data`, or those to `keep`, and the answers behind them, called
    `predicted_…` where a column of their name is among them. `embeddings` is a new .npy file for a vector of each text.
    """
    found = answer(
        Path(run),
        Path(data),
        Path(out),
        say=_say(progress),
        device=device,
        keep=(keep,) if isinstance(keep, str) else tuple(keep),
        probabilities=probabilities,
        embeddings=None if embeddings is None else Path(embeddings),
    )
    return found.rows


def load(run: str | PathLike[str]) -> Model:
    """The model of a recipe's run, for answers in memory: `hotlap.load(run).predict(["a text", "another"])`.

    Raises StoreError where the folder is no finished run of a recipe.
    """
    return Model(Path(run))


def _say(progress: bool) -> Say:
    return say if progress else only_warnings(say)
