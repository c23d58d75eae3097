"""`hotlap demo`, `hotlap tune` and `hotlap resume`: trainings of jobs, in this process."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hotlap.cli.output import show, show_json
from hotlap.core.errors import HotlapError, UsageError
from hotlap.core.terminal import say

if TYPE_CHECKING:
    from hotlap.core.job import Job
    from hotlap.fitting.run import FinishedRun
    from hotlap.store.run_folder import RunFolder
    from hotlap.trees import TreeJob


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(demo)
    app.command()(tune)
    app.command(context_settings={"allow_interspersed_args": False})(resume)


def demo(
    epochs: int = typer.Option(200, min=1, max=100_000, metavar="N", help="Epochs to train."),
    device: str = typer.Option("auto", "--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N."),
    plan: str | None = typer.Option(
        None, "--plan", metavar="PLAN", help="auto (default), max, off, a plan file, or a run folder to replay."
    ),
    out: Path | None = typer.Option(None, metavar="FOLDER", help="A new folder for the run; by default one in runs/."),
    reuse: bool = typer.Option(False, "--reuse", help="Load the model if the same training has run before."),
    require_gpu: bool = typer.Option(False, "--require-gpu", help="Stop if no GPU works."),
    report: bool = typer.Option(False, "--report", help="Write report.html into the run folder at the end."),
    as_json: bool = typer.Option(False, "--json", help="Print the figures as JSON."),
    quiet: bool = typer.Option(False, "--quiet", help="Show no progress."),
) -> None:
    """Train a small network on the digits that come with hotlap.

    They are 1,797 handwritten digits of 8 by 8 pixels.
    """
    from hotlap import machine

    # Before torch loads the data: an unfit machine is refused at once.
    machine.choose_device(device, require_gpu=require_gpu)

    from hotlap.demo import digits_job
    from hotlap.fitting.fit import fit

    job = digits_job(epochs=epochs, device=device)
    words = ["hotlap", "demo", "--epochs", str(epochs), "--device", device]
    run = fit(job, plan=plan, out=out, reuse=reuse, require_gpu=require_gpu, progress=not quiet, started_by=words)
    print_run(run, as_json, report=report)


# --- hotlap tune ------------------------------------------------------------------------------------------


def tune(
    training: str = typer.Argument(metavar="TRAINING", help="module:job (train:job is `job` in train.py), or demo."),
    out: Path = typer.Option(Path("plan.toml"), metavar="FILE", help="The plan file to write."),
    seconds: float = typer.Option(
        60.0, "--seconds", min=1.0, metavar="SECONDS", help="Most seconds that tuning may cost."
    ),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace the file if it exists."),
    as_json: bool = typer.Option(False, "--json", help="Print the figures as JSON."),
    quiet: bool = typer.Option(False, "--quiet", help="Show no progress."),
) -> None:
    """Find the fastest plan for a training, and write it to a file.

    hotlap trains until it has found the plan, and throws the weights away.
    """
    from hotlap.core.errors import StoreError
    from hotlap.core.table import as_json as table_as_json
    from hotlap.core.table import table
    from hotlap.demo import digits_job
    from hotlap.fitting.tuning import tune as find_plan
    from hotlap.kit.calls import named_job
    from hotlap.machine.limits import warn_if_busy
    from hotlap.store.files import save_plan

    if out.exists() and not overwrite:
        raise StoreError(f"{out} exists; name another file with --out, or add --overwrite")
    if not quiet:
        warn_if_busy(say)
    job = digits_job() if training == "demo" else named_job(training)
    found = find_plan(job, most_s=seconds, progress=not quiet)
    save_plan(found.plan, out)
    if as_json:
        show_json({"plan": found.plan.to_dict(), "file": str(out), "tuning": table_as_json(found.ledger)})
        return
    use = f"use it with --plan {out}, or fit(job, plan={str(out)!r})"
    show(*table(found.ledger), f"plan  {found.plan}", f"file  {out}; {use}")


# --- hotlap resume ------------------------------------------------------------------------------------------


def resume(
    run: Path = typer.Argument(metavar="RUN", help="The folder of the run."),
    training: list[str] = typer.Argument(
        None,
        metavar="TRAINING",
        help="How the run started: train.py ARGS, -m MODULE ARGS, or module:job. hotlap's own runs need none.",
    ),
    allow_changes: bool = typer.Option(False, "--allow-changes", help="Go on even if code, data or settings differ."),
    report: bool = typer.Option(False, "--report", help="Write report.html into the run folder at the end."),
    as_json: bool = typer.Option(False, "--json", help="Print the figures as JSON."),
    quiet: bool = typer.Option(False, "--quiet", help="Show no progress."),
) -> None:
    """Go on with an interrupted run.

    It goes on from the newest intact checkpoint, or from step 0 if the run has none. Boosters of trees that were done
    stay.
    """
    from hotlap.fitting.record import checked_words
    from hotlap.kit.calls import named_training
    from hotlap.recipes.options import run_of
    from hotlap.store.run_folder import RunFolder

    # Options behind the folder belong to the script, but for these.
    training = list(training or ())
    flags = {"--allow-changes": allow_changes, "--report": report, "--json": as_json, "--quiet": quiet}
    while training and training[0] in flags:
        flags[training.pop(0)] = True
    if not run.is_dir():
        raise HotlapError(_no_folder(run))
    if (whole := run_of(run)) is not None:
        _resume_recipe(whole, training, flags)
        return
    folder = RunFolder.open(run)
    if _is_of_a_script(folder):
        raise HotlapError(
            f"{run} is a run of `hotlap run`, which keeps no checkpoints but the script's own; run the script again, "
            f"with --plan {shlex.quote(str(run))} to use the plan that hotlap found"
        )
    if training and training[0].endswith(".zip"):
        raise UsageError(f"{training[0]} is an archive, and no training; unpack it: hotlap unpack {training[0]} FOLDER")
    if training and (training[0] == "-m" or ":" not in training[0] or training[0].endswith(".py")):
        _run_script(folder, training, flags)
        return
    job = named_training(training[0]) if training else _own_job(folder, checked_words(folder))
    print_run(_gone_on(run, job, flags), flags["--json"], report=flags["--report"])


def _gone_on(run: Path, job: Job | TreeJob, flags: dict[str, bool]) -> FinishedRun:
    """The training of a job, gone on with in its folder."""
    from hotlap import trees
    from hotlap.fitting.fit import fit

    progress = not flags["--quiet"]
    if not isinstance(job, trees.TreeJob):
        return fit(job, resume=run, allow_changes=flags["--allow-changes"], progress=progress)
    if flags["--allow-changes"]:
        raise UsageError("--allow-changes does not apply to trees; train anew in another folder")
    return trees.fit(job, resume=run, progress=progress)


def _no_folder(run: Path) -> str:
    if run.suffix == ".zip" and run.is_file():
        return f"{run} is an archive; unpack it first: hotlap unpack {shlex.quote(str(run))} FOLDER"
    return f"{run} {'is a file' if run.exists() else 'does not exist'}; name the folder of a run"


def _resume_recipe(folder: Path, words: list[str], flags: dict[str, bool]) -> None:
    """Go on with a recipe's run; behind its folder may come options such as --epochs."""
    from hotlap.core.errors import JobError
    from hotlap.recipes.options import from_words
    from hotlap.recipes.recipe import only_warnings
    from hotlap.recipes.training import REPORT, resume

    if flags["--allow-changes"]:
        raise UsageError("--allow-changes does not apply to a recipe's run; name other options in a new run")
    quiet = flags["--quiet"]
    try:
        resume(folder, from_words(words), say=only_warnings(say) if quiet else say, progress=not quiet)
    except JobError as error:
        raise UsageError(str(error)) from None
    if flags["--json"]:
        show_json(json.loads((folder / REPORT).read_text(encoding="utf-8")), indent=1)
    else:
        show(folder)


def _is_of_a_script(folder: RunFolder) -> bool:
    """Whether the folder is of `hotlap run`; one without a record of its start is not."""
    try:
        return folder.read_started().get("command") == "run"
    except HotlapError:
        return False


def print_run(run: FinishedRun, as_json: bool, *, report: bool = False) -> None:
    """A run's figures on stdout, and its report where asked for; exit code 1 where something could not be written."""
    written = run.report() if report else None
    if as_json:
        show_json(run.to_dict(), indent=2)
    else:
        show(*run.summary().split("\n"), *([f"report    {written}"] if written is not None else []))
    if run.problems:
        raise typer.Exit(1)


def _own_job(folder: RunFolder, words: list[str]) -> Job:
    """The job of a training that a command of hotlap's started; of any other, how to name it."""
    from hotlap.demo import digits_job

    if words[:2] != ["hotlap", "demo"]:
        # hotlap shows the command in a folder and never runs it: the folder may be a stranger's.
        raise HotlapError(
            f"a program of yours started {folder.path}; name it: "
            f"hotlap resume {shlex.quote(str(folder.path))} {shlex.join(words)}"
        )
    options: dict[str, str] = dict(zip(words[2::2], words[3::2], strict=False))
    epochs, device = options.get("--epochs", "200"), options.get("--device", "auto")
    if not re.fullmatch("[0-9]{1,6}", epochs) or not 1 <= int(epochs) <= 100_000:
        raise HotlapError(f"the run folder names --epochs {epochs!r:.20}; it must be a number from 1 to 100,000")
    return digits_job(epochs=int(epochs), device=device)


def _run_script(folder: RunFolder, words: list[str], flags: dict[str, bool]) -> None:
    """Run a script or module as `python` would; its call of `fit` goes on with the run."""
    import runpy

    from hotlap.fitting.record import RESUME, has_gone_on

    for flag in ("--allow-changes", "--json", "--report"):
        if flags[flag]:
            raise UsageError(f"{flag} does not reach {words[0]}; set it where that calls fit, or name module:job")
    if flags["--quiet"]:
        os.environ["HOTLAP_PROGRESS"] = "off"
    os.environ[RESUME] = str(folder.path.resolve())
    if words[0] == "-m":
        if len(words) < 2:
            raise UsageError("-m needs the name of a module")
        sys.argv = words[1:]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        if not Path(words[0]).is_file():
            raise UsageError(f"{words[0]} is no file; name the script as you did when you started it")
        sys.argv = list(words)
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")
    if not has_gone_on(folder.path):
        raise HotlapError(f"{words[words[0] == '-m']} ended without going on with {folder.path}")
