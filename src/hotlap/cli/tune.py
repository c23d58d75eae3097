"""`hotlap tune`: find the plan for a training, and write it down."""

from __future__ import annotations

from pathlib import Path

import typer

from hotlap.cli.output import show, show_json


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(tune)


def tune(
    training: str = typer.Argument(help="The training: module:job, or demo."),
    out: Path = typer.Option(Path("plan.toml"), help="The plan file to write."),
    seconds: float = typer.Option(60.0, min=1.0, help="What tuning may cost at most, in seconds."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Write over a file that is there."),
    as_json: bool = typer.Option(False, "--json", help="Print the figures as JSON."),
    quiet: bool = typer.Option(False, "--quiet", help="Show no progress."),
) -> None:
    """Only tune: train until the fastest plan is found, write it to a file, and throw the trained weights away."""
    from hotlap.core.errors import StoreError
    from hotlap.core.table import as_json as table_as_json
    from hotlap.core.table import table
    from hotlap.demo import digits_job
    from hotlap.fitting.tuning import tune as find_plan
    from hotlap.kit.calls import named_job
    from hotlap.store.files import save_plan

    if out.exists() and not overwrite:
        raise StoreError(f"{out} is there already; name another file with --out, or give --overwrite")
    job = digits_job() if training == "demo" else named_job(training)
    found = find_plan(job, most_s=seconds, progress=not quiet)
    save_plan(found.plan, out)
    if as_json:
        show_json({"plan": found.plan.to_dict(), "file": str(out), "tuning": table_as_json(found.ledger)})
        return
    use = f"use it with --plan {out}, or fit(job, plan={str(out)!r})"
    show(*table(found.ledger), f"plan  {found.plan}", f"file  {out}; {use}")
