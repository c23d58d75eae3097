"""Boosted trees as models of a recipe: their settings, their training in the run's folder, and a mix with others."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hotlap import trees
from hotlap.core.errors import install
from hotlap.fitting.fit import AnotherTrainingError
from hotlap.recipes.answers import command_of
from hotlap.recipes.options import Options
from hotlap.recipes.recipe import Trainer
from hotlap.trees import TreeJob, TreeRun


@dataclass(frozen=True, kw_only=True, eq=False)
class Mixture:
    """Trained models, and the share of each: a number, or one for each target."""

    parts: Mapping[str, Any]
    shares: Mapping[str, Any]


def missing_line(library: str) -> str | None:
    """What to say where a library is not installed; None where it is."""
    if importlib.util.find_spec(library) is not None:
        return None
    return f"warning   left out: {library} is not installed: {install('[trees]')}"


def settings_of(options: Options, library: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """What a TreeJob takes of a recipe's options, with the parameters for its library."""
    device = {"device": options.device} if library == "xgboost" and options.device != "auto" else {}
    return {"library": library, "params": {**params, **device}, "seed": options.seed % 2**31}


def train_trees(
    job: TreeJob, out: Path, trainer: Trainer, options: Options, *, share: float = 1.0, progress: bool = False
) -> TreeRun:
    """Train trees in a folder, or go on where they were interrupted there, in this share of the time left."""
    plan = "off" if options.plan == "off" else None
    limit = None if trainer.limit is None else trainer.limit.part(share)
    fit = partial(
        trees.fit, job, plan=plan, reuse=trainer.reuse, finish_in=limit, progress=progress,
        started_by=command_of(trainer.folder), log=options.log,
    )  # fmt: skip
    try:
        run = fit(resume=out) if (out / "record.json").is_file() and (out / "plan.toml").is_file() else fit(out=out)
    except AnotherTrainingError:  # where a deadline had cut folds, the last trees may have other rounds now
        shutil.rmtree(out)
        run = fit(out=out)
    trainer.left_out.extend(f"{out.name}: {line}" for line in run.left_out)
    return run
