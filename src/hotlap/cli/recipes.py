"""`hotlap train`, `hotlap predict` and `hotlap recipes`: from a file to predictions."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from hotlap.cli.output import show, show_json
from hotlap.core.terminal import say


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(train)
    app.command()(predict)
    app.command()(recipes)


def train(
    context: typer.Context,
    recipe: str = typer.Argument(help="A recipe: see hotlap recipes."),
    options: Path | None = typer.Option(None, help="A file of options; every run writes the one that repeats it."),
    out: Path | None = typer.Option(None, help="A new folder for the run; as a rule one under runs/."),
    retrain: bool = typer.Option(False, "--retrain", help="Train again what was trained before."),
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
    quiet: bool = typer.Option(False, "--quiet", help="Show no progress, only warnings."),
) -> None:
    """Train a ready system on a file: --data FILE --target COLUMN, and whatever `hotlap recipes NAME` lists."""
    from hotlap.core.errors import JobError, UsageError
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
    )
    if as_json or calling.json:
        show_json(json.loads((folder / REPORT).read_text(encoding="utf-8")), indent=1)
    else:
        show(folder)


def predict(
    run: Path = typer.Argument(help="The folder of a run."),
    data: Path = typer.Option(help="The file to predict; of pictures, a folder or one too."),
    out: Path = typer.Option(help="The file to write, CSV or Parquet."),
    keep: list[str] = typer.Option(
        [], help="Columns of the data to write beside the answers, with commas; as a rule all."
    ),
    probabilities: bool = typer.Option(False, "--probabilities", help="Write the probability of each class too."),
    embeddings: Path | None = typer.Option(None, help="A new .npy file for a vector of each text."),
    device: str = typer.Option("auto", help="auto, cpu, cuda or cuda:N."),
    as_json: bool = typer.Option(False, "--json", help="Print what was written as JSON."),
) -> None:
    """Write what a trained recipe answers for each row of a file."""
    from hotlap.recipes.training import answer

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
    said = {"rows": found.rows, "rows_without_answer": found.of - found.rows, "file": str(out)}
    if as_json:
        show_json(said)
    else:
        show(f"{found.line} in {out}")


def recipes(
    name: str | None = typer.Argument(None, help="A recipe, to see all that it can be told."),
    as_json: bool = typer.Option(False, "--json", help="Print them as JSON."),
) -> None:
    """List the recipes, or all options of one."""
    from hotlap.recipes import NAMES, recipe_named
    from hotlap.recipes.options import as_json as as_json_options
    from hotlap.recipes.options import told

    if as_json:
        listed = [recipe_named(one) for one in ([name] if name else NAMES)]
        show_json([{**one.to_dict(), "options": as_json_options(one.options_type)} for one in listed])
        return
    for one in [name] if name else NAMES:
        found = recipe_named(one)
        show(f"{found.name:<10} {found.summary}")
        show(f"{'':<10} needs {found.expects}")
        if name:
            for line in told(found.options_type):
                show(f"  {line}")
        else:
            show(f"{'':<10} hotlap train {found.name} --data FILE; options: hotlap recipes {found.name}")
