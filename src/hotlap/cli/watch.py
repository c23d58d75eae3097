"""`hotlap watch`: the GPUs and the running trainings."""

from __future__ import annotations

import os
import signal
import sys

import typer

from hotlap.cli.output import show, show_json
from hotlap.core.terminal import is_terminal


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(watch)


def watch(
    run: str | None = typer.Argument(
        None, metavar="RUN|PID", help="The folder of a run, or a process; by default all trainings in runs/."
    ),
    once: bool = typer.Option(False, "--once", help="Print what is to be seen now, and end."),
    every: float = typer.Option(1.0, "--every", min=0.1, metavar="SECONDS", help="Seconds between two looks."),
    as_json: bool = typer.Option(False, "--json", help="Print what is to be seen now as JSON, and end."),
) -> None:
    """Show the GPUs and the running trainings, live.

    Loss, pace, time left, memory, what bounds it now. Ctrl-C ends it. Without a terminal it prints one view.
    """
    from hotlap.monitor.watch import Watcher, in_terminal, look_once
    from hotlap.monitor.watch import once as lines_of

    watcher = Watcher(run)
    if as_json:
        show_json(look_once(watcher).to_dict(), indent=2)
    elif once or not is_terminal(sys.stdout) or os.environ.get("TERM") == "dumb":
        show(*lines_of(watcher), wrap=False)
    else:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # after the screen is restored
        in_terminal(watcher, every)
