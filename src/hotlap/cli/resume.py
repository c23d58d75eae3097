"""`hotlap resume`: go on with a run that was interrupted."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hotlap.core.errors import HotlapError

if TYPE_CHECKING:
    from hotlap.core.job import Job
    from hotlap.fitting.run import Run


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
    """Go on with an interrupted run from its newest checkpoint that is whole."""
    from hotlap.fitting.loop import fit
    from hotlap.fitting.started import RESUME, checked_words
    from hotlap.store.run_folder import RunFolder

    words = checked_words(RunFolder.open(run))
    if not training and words[:2] == ["hotlap", "demo"]:
        job = _demo_job(words[2:])
    elif not training:
        # What a folder says about commands is shown, never run: it may be a stranger's.
        raise HotlapError(
            f"{run} was started by a program of yours; name it again: "
            f"hotlap resume {shlex.quote(str(run))} {shlex.join(words)}"
        )
    elif ":" in training[0] and not training[0].endswith(".py"):
        job = _named_job(training[0])
    else:
        os.environ[RESUME] = str(run.resolve())
        _run_script(training)
        return
    finished = fit(job, resume=run, allow_changes=allow_changes, progress=not quiet)
    print_run(finished, as_json)


def print_run(run: Run, as_json: bool) -> None:
    """A run's figures on stdout; exit code 1 where something could not be written."""
    print(json.dumps(run.to_dict(), indent=2) if as_json else run.summary())
    if run.problems:
        raise typer.Exit(1)


def _demo_job(words: list[str]) -> Job:
    from hotlap.demo import digits_job

    options: dict[str, Any] = dict(zip(words[::2], words[1::2], strict=False))
    epochs, device = options.get("--epochs", "15"), options.get("--device", "auto")
    if not epochs.isdigit() or not 1 <= int(epochs) <= 100_000:
        raise HotlapError(f"the run says it was started with --epochs {epochs!r:.20}, which is no number of epochs")
    return digits_job(epochs=int(epochs), device=device)


def _named_job(name: str) -> Job:
    """The Job called `module:job`, or what the function of that name returns."""
    import importlib

    from hotlap.core.job import Job

    module, _, attribute = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise HotlapError(f"{name}: {error}; name it as module:job, seen from this folder") from None
    except AttributeError:
        raise HotlapError(f"{name}: {module} has no {attribute!r}") from None
    job = found() if callable(found) and not isinstance(found, Job) else found
    if not isinstance(job, Job):
        raise HotlapError(f"{name} is a {type(job).__name__}, not a hotlap.Job")
    return job


def _run_script(words: list[str]) -> None:
    """Run a script or module as `python` would."""
    import runpy

    if words[0] == "-m":
        if len(words) < 2:
            raise HotlapError("-m needs the name of a module")
        sys.argv = words[1:]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    if not Path(words[0]).is_file():
        raise HotlapError(f"{words[0]} is no file; name the script as you did when you started it")
    sys.argv = list(words)
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    runpy.run_path(words[0], run_name="__main__")
