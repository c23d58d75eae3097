"""`hotlap train`, `hotlap predict` and `hotlap recipes`: from a file to predictions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from hotlap.cli.output import show, show_json
from hotlap.core.terminal import say

OWN_PROCESS = "own process"
"""The object of a command's context where the process runs that command alone."""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(cls=_Train, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(train)
    app.command()(predict)
    app.command()(recipes)


class _Train(TyperCommand):
    """Shows the options of a recipe where help is asked for behind its name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The words of a command line."""
        from hotlap.recipes import NAMES

        names = [word for word in args if word in NAMES]
        if names and {"--help", "-h"} & set(args):
            _show_recipe(names[0])
            raise typer.Exit
        return list(super().parse_args(ctx, args))


def train(
    context: typer.Context,
    recipe: str = typer.Argument(metavar="RECIPE", help="A recipe: text, price, temporal, image or forecast."),
    options: Path | None = typer.Option(
        None, metavar="FILE", help="A file of options; the options.toml of a run repeats it."
    ),
    out: Path | None = typer.Option(None, metavar="FOLDER", help="A new folder for the run; by default one in runs/."),
    retrain: bool = typer.Option(False, "--retrain", help="Train again instead of reading the model from the cache."),
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
    quiet: bool = typer.Option(False, "--quiet", help="Show no progress, only warnings."),
) -> None:
    """Train a recipe on a file: --data FILE --target COLUMN. `hotlap train text --help` lists all options of text."""
    from hotlap.core.errors import JobError, UsageError
    from hotlap.machine.host import process_age_s
    from hotlap.recipes import recipe_named
    from hotlap.recipes.options import calling_of, from_words, options_of, recipe_in
    from hotlap.recipes.recipe import only_warnings
    from hotlap.recipes.training import REPORT
    from hotlap.recipes.training import train as trained

    chosen = recipe_named(recipe)
    if options is not None and recipe_in(options) not in (None, recipe):
        raise UsageError(f"{options} belongs to the recipe {recipe_in(options)}, not to {recipe}")
    try:
        given = options_of(chosen.options_type, options, from_words(context.args))
        calling = calling_of(options)
    except JobError as error:
        raise UsageError(str(error)) from None
    quiet |= calling.quiet
    folder = trained(
        chosen,
        given,
        out=out or (Path(calling.out) if calling.out else None),
        retrain=retrain or calling.retrain,
        say=only_warnings(say) if quiet else say,
        progress=not quiet,
        used_s=process_age_s() if context.obj == OWN_PROCESS else 0.0,
    )
    if as_json or calling.json:
        show_json(json.loads((folder / REPORT).read_text(encoding="utf-8")), indent=1)
    else:
        show(folder)


def predict(
    run: Path = typer.Argument(metavar="RUN", help="The folder of a run."),
    data: Path = typer.Option(metavar="FILE", help="The file to predict; also a folder of pictures, or one picture."),
    out: Path = typer.Option(metavar="FILE", help="The new file to write, CSV or Parquet."),
    keep: list[str] = typer.Option(
        [], metavar="COLUMNS", help="Columns to write beside the answers, such as id,title; by default all."
    ),
    probabilities: bool = typer.Option(False, "--probabilities", help="Write the probability of each class too."),
    embeddings: Path | None = typer.Option(None, metavar="FILE", help="A new .npy file for a vector of each text."),
    device: str = typer.Option("auto", "--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N."),
    as_json: bool = typer.Option(False, "--json", help="Print what was written as JSON."),
) -> None:
    """Write a recipe's answers for each row of a file.

    hotlap scores the answers if the file has the target.
    """
    from hotlap.recipes.answers import answer

    found = answer(
        run,
        data,
        out,
        say=say,
        device=device,
        keep=tuple(keep),
        probabilities=probabilities,
        embeddings=embeddings,
    )
    said: dict[str, Any] = {"rows": found.rows, "rows_without_answer": found.of - found.rows, "file": str(out)}
    if found.report is not None:
        said["scores"] = found.report
    if as_json:
        show_json(said)
    else:
        show(f"{found.line} in {out}")


def recipes(
    name: str | None = typer.Argument(None, metavar="RECIPE", help="A recipe, to list its options."),
    as_json: bool = typer.Option(False, "--json", help="Print them as JSON."),
) -> None:
    """List the recipes, or all options of one."""
    from hotlap.recipes import NAMES, recipe_named
    from hotlap.recipes.options import as_json as as_json_options

    if as_json:
        listed = [recipe_named(one) for one in ([name] if name else NAMES)]
        show_json([{**one.to_dict(), "options": as_json_options(one.options_type)} for one in listed])
    elif name:
        _show_recipe(name)
    else:
        for one in NAMES:
            found = recipe_named(one)
            show(f"{found.name:<10} {found.summary}")
            show(f"{'':<10} needs {found.expects}")
            show(f"{'':<10} hotlap train {found.name} --data FILE; options: hotlap train {found.name} --help")


def _show_recipe(name: str) -> None:
    """All options of a recipe, and those of the command."""
    from hotlap.recipes import recipe_named
    from hotlap.recipes.options import option_lines

    found = recipe_named(name)
    show(f"Usage: hotlap train {name} --data FILE [OPTIONS]", "", f"{found.summary[:1].upper()}{found.summary[1:]}.")
    show(f"Needs {found.expects}.", "", "Options:")
    show(*option_lines(found.options_type, shutil.get_terminal_size().columns))
    show("", "See also: hotlap train --help, for --out, --options, --retrain, --json and --quiet.")
