"""`hotlap resume`: go on with a run that was interrupted."""

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

if TYPE_CHECKING:
    from hotlap.core.job import Job
    from hotlap.fitting.run import Run
    from hotlap.store.run_folder import RunFolder


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(context_settings={"allow_interspersed_args": False})(resume)


def resume(
    run: Path = typer.Argument(help="The folder of the run."),
    training: list[str] = typer.Argument(
        None, help="How it was started: train.py ARGS, -m MODULE ARGS, or module:job. Not needed for hotlap's own."
    ),
    allow_changes: bool = typer.Option(False, "--allow-changes", help="Go on though code, data or settings differ."),
    as_json: bool = typer.Option(False, "--json", help="Print the figures as JSON."),
    quiet: bool = typer.Option(False, "--quiet", help="Show no progress."),
) -> None:
    """Go on with an interrupted run: from its newest checkpoint that is whole, or from step 0 if it never had one."""
    from hotlap.fitting.fit import fit
    from hotlap.fitting.record import checked_words
    from hotlap.kit.calls import named_job
    from hotlap.recipes.options import run_of
    from hotlap.store.run_folder import RunFolder

    # After the folder nothing is read as an option, so that a script's own stay its own; these are ours all the same.
    training = list(training or ())
    flags = {"--allow-changes": allow_changes, "--json": as_json, "--quiet": quiet}
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
            f"{run} is of `hotlap run`, which keeps no checkpoints: the script's own are its own affair; run it again, "
            f"with --plan {shlex.quote(str(run))} under the plan that was found"
        )
    if training and training[0].endswith(".zip"):
        raise UsageError(f"{training[0]} is an archive, and no training; unpack it: hotlap unpack {training[0]} FOLDER")
    if training and (training[0] == "-m" or ":" not in training[0] or training[0].endswith(".py")):
        _run_script(folder, training, flags)
        return
    job = named_job(training[0]) if training else _own_job(folder, checked_words(folder))
    finished = fit(job, resume=run, allow_changes=flags["--allow-changes"], progress=not flags["--quiet"])
    print_run(finished, flags["--json"])


def _no_folder(run: Path) -> str:
    if run.suffix == ".zip" and run.is_file():
        return f"{run} is an archive; unpack it first: hotlap unpack {shlex.quote(str(run))} FOLDER"
    return f"{run} {'is a file' if run.exists() else 'does not exist'}; name the folder of a run"


def _resume_recipe(folder: Path, words: list[str], flags: dict[str, bool]) -> None:
    """Go on with a recipe's run; behind its folder may come options such as --epochs."""
    from hotlap.core.errors import JobError
    from hotlap.core.terminal import say
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
    """Whether `hotlap run` has left it; a folder that does not say how it was started is none of its."""
    try:
        return folder.read_started().get("command") == "run"
    except HotlapError:
        return False


def print_run(run: Run, as_json: bool) -> None:
    """A run's figures on stdout; exit code 1 where something could not be written."""
    if as_json:
        show_json(run.to_dict(), indent=2)
    else:
        show(*run.summary().split("\n"))
    if run.problems:
        raise typer.Exit(1)


def _own_job(folder: RunFolder, words: list[str]) -> Job:
    """The job of a training that a command of hotlap's started; of any other, how to name it."""
    from hotlap.demo import digits_job

    if words[:2] != ["hotlap", "demo"]:
        # What a folder says about commands is shown, never run: it may be a stranger's.
        raise HotlapError(
            f"{folder.path} was started by a program of yours; name it again: "
            f"hotlap resume {shlex.quote(str(folder.path))} {shlex.join(words)}"
        )
    options: dict[str, str] = dict(zip(words[2::2], words[3::2], strict=False))
    epochs, device = options.get("--epochs", "200"), options.get("--device", "auto")
    if not re.fullmatch("[0-9]{1,6}", epochs) or not 1 <= int(epochs) <= 100_000:
        raise HotlapError(f"the run says it was started with --epochs {epochs!r:.20}, which is no number of epochs")
    return digits_job(epochs=int(epochs), device=device)


def _run_script(folder: RunFolder, words: list[str], flags: dict[str, bool]) -> None:
    """Run a script or module as `python` would; its call of `fit` goes on with the run."""
    import runpy

    from hotlap.fitting.record import RESUME, has_gone_on

    for flag in ("--allow-changes", "--json"):
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
