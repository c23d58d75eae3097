"""`hotlap demo`: a real small training, to see hotlap work."""

from __future__ import annotations

from pathlib import Path

import typer

from hotlap.cli.resume import print_run


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(demo)


def demo(
    epochs: int = typer.Option(200, min=1, max=100_000, help="Epochs to train."),
    device: str = typer.Option("auto", help="auto, cpu, cuda or cuda:N."),
    plan: str | None = typer.Option(
        None, help="A plan file, or a run to replay; max: all that this machine can do; off: as it is."
    ),
    out: Path | None = typer.Option(None, help="A new folder for the run; as a rule one under runs/."),
    reuse: bool = typer.Option(False, "--reuse", help="Load the model if this very training was done before."),
    require_gpu: bool = typer.Option(False, "--require-gpu", help="Stop at once if no GPU works."),
    as_json: bool = typer.Option(False, "--json", help="Print the figures as JSON."),
    quiet: bool = typer.Option(False, "--quiet", help="Show no progress."),
) -> None:
    """Train a small network on 1,797 handwritten digits that come with hotlap."""
    from hotlap import machine

    # Before anything is loaded: a machine that will not do should say so at once.
    machine.choose_device(device, require_gpu=require_gpu)

    from hotlap.demo import digits_job
    from hotlap.fitting.fit import fit

    job = digits_job(epochs=epochs, device=device)
    words = ["hotlap", "demo", "--epochs", str(epochs), "--device", device]
    run = fit(job, plan=plan, out=out, reuse=reuse, require_gpu=require_gpu, progress=not quiet, started_by=words)
    print_run(run, as_json)
