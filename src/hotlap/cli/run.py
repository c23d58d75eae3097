"""`hotlap run`: a user's script, unchanged and faster."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import typer

from hotlap.cli.output import show
from hotlap.core.errors import did_you_mean
from hotlap.core.terminal import say
from hotlap.core.tricks import TRICKS

USAGE = "hotlap run [OPTIONS] train.py ARGS…, or hotlap run [OPTIONS] -m MODULE ARGS…"


class ToRun(BaseException):
    """Leaves the command for the script, which `begin` runs; no handler on the way takes it for something else.

    A script has as few frames beneath it as can be: torch formats all of them at every `torch.manual_seed`, and the
    workers of a loader have those of the process that they were forked from.
    """

    def __init__(self, begin: Callable[[], int]) -> None:
        """`begin` gives an exit code; minus a signal's number where the command is to end by that."""
        self.begin = begin


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(context_settings={"allow_interspersed_args": False})(run)


def run(
    script: list[str] = typer.Argument(None, metavar="SCRIPT", help="Script to run, followed by its arguments."),
    module: bool = typer.Option(False, "-m", help="SCRIPT is a module, as for `python -m`."),
    off: bool = typer.Option(False, "--off", help="Run it without hotlap."),
    compare: bool = typer.Option(False, "--compare", help="Run it without and with hotlap, in turns, and compare."),
    rounds: int = typer.Option(
        2, min=1, max=100, metavar="N", help="With --compare: runs each way. 1 shows no spread."
    ),
    plan: str | None = typer.Option(
        None, "--plan", metavar="PLAN", help="auto (default), max, off, a plan file, or a run folder to replay."
    ),
    out: Path | None = typer.Option(None, metavar="FOLDER", help="A new folder for the run; by default one in runs/."),
    tune_seconds: float | None = typer.Option(
        None, min=0.0, metavar="SECONDS", help="Most seconds that tuning may cost; by default a small share of the run."
    ),
    without: list[str] = typer.Option(
        [],
        metavar="NAME",
        help="Leave out a move or trick, such as 16-bit; may be repeated. `--without '?'` lists them.",
    ),
    report: bool = typer.Option(False, "--report", help="Write report.html into the run folder at the end."),
    as_json: bool = typer.Option(False, "--json", help="Print the figures at the end as JSON, on stderr."),
) -> None:
    """Run a training script, unchanged, and make it faster.

    hotlap writes to stderr only. The exit code is the script's; 2 if there is no script to run.
    """
    from hotlap.script import running

    if "?" in without:
        _list_tricks()
        raise typer.Exit
    if not script:
        _refuse(f"name a script to run: {USAGE}")
    if off or plan == "off":
        others = {
            "--compare": compare,
            f"--plan {plan}": plan not in (None, "off"),
            "--out": out is not None,
            "--tune-seconds": tune_seconds is not None,
            "--without": bool(without),
            "--report": report,
            "--json": as_json,
        }
        if any(others.values()):
            given = ", ".join(word for word, is_given in others.items() if is_given)
            _refuse(f"{'--off' if off else '--plan off'} leaves the script alone; drop {given}")
    if compare and report:
        _refuse("--compare makes several runs; drop --report, and use `hotlap report RUN` afterwards")
    if compare and as_json:
        _refuse("--compare prints no JSON; drop --json")
    _check_names(without)
    target = running.Target(args=script[1:], **{"module" if module else "path": script[0]})
    seed = _seed()
    wanted = "off" if off else plan or os.environ.get("HOTLAP_PLAN") or "auto"
    if wanted == "off" and compare:
        _refuse("HOTLAP_PLAN=off leaves nothing to compare; add --plan auto")
    if wanted == "off":
        raise ToRun(partial(running.run, target, seed=seed))
    try:
        running.look(target)
    except running.NoScriptError as error:
        _refuse(str(error))
    _check(wanted, out)
    if compare:
        from hotlap.script.compare import compare as run_both

        options = {"--plan": plan, "--tune-seconds": tune_seconds}
        words = [str(word) for pair in options.items() if pair[1] is not None for word in pair]
        words += [word for name in without for word in ("--without", name)]
        raise ToRun(partial(run_both, target, words, seed=seed or 0, out=out, rounds=rounds))
    watched = _Watched(
        name=target.name,
        plan=wanted if wanted != "auto" else None,
        out=out.absolute() if out else None,  # the script may change the working directory before the folder is made
        tune_s=tune_seconds,
        without=tuple(without),
        as_json=as_json,
        report=report,
        words=tuple(target.words),
    )
    raise ToRun(partial(running.run, target, watched, seed))


class _Watched:
    """A session that imports what it needs when it is opened: should that fail, the script runs without it."""

    def __init__(self, **settings: Any) -> None:
        self._settings = settings

    def __enter__(self) -> None:
        began = time.perf_counter()
        import torch  # noqa: F401

        torch_s = time.perf_counter() - began
        from hotlap.script.session import Session, Settings

        self._session = Session(Settings(**self._settings, torch_s=torch_s))
        self._session.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._session.__exit__(kind, error, at)


def _list_tricks() -> None:
    """Print the name of each trick, and what it does."""
    longest = max(map(len, TRICKS))
    show(*(f"{name:<{longest}}  {words}" for name, words in TRICKS.items()))


def _check_names(without: list[str]) -> None:
    """Refuse a name that is neither a move's nor a trick's."""
    unknown = next((name for name in without if name not in TRICKS), None)
    if unknown is not None:
        close = did_you_mean(unknown, TRICKS)
        meant = close if "did you mean" in close else "; `hotlap run --without '?'` lists all names"
        _refuse(f"--without {unknown}: unknown name{meant}")


def _check(plan: str, out: Path | None) -> None:
    """Refuse what cannot be read or written as asked, before the script runs for nothing."""
    if plan in ("auto", "max") and out is None:
        return
    from hotlap.store.files import load_plan
    from hotlap.store.run_folder import RunFolder

    if Path(plan).is_dir():
        RunFolder.open(plan).read_ledger()
    elif plan not in ("auto", "max"):
        if not Path(plan).exists():
            _refuse(f"unknown plan {plan!r}: use auto, off, max, a plan file or a run folder")
        load_plan(plan)
    if out is not None:
        made = [folder for folder in (out, *out.parents) if not folder.exists()]
        RunFolder.create(out)
        with suppress(OSError):  # another run may have begun beside it
            for folder in made:  # nothing is left where nothing is trained
                folder.rmdir()


def _seed() -> int | None:
    """The seed that HOTLAP_SEED names for all random numbers."""
    text = os.environ.get("HOTLAP_SEED")
    if not text:
        return None
    if not text.isdecimal() or int(text) >= 2**32:
        _refuse(f"HOTLAP_SEED is {text!r:.40}; a seed is a whole number from 0 to {2**32 - 1}")
    return int(text)


def _refuse(line: str) -> NoReturn:
    say(f"hotlap: {line}")
    raise typer.Exit(2)
