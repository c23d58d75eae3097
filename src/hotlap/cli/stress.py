"""`hotlap stress`: kill trainings on purpose and see whether anything is lost."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

import typer

from hotlap.cli.output import show, show_json
from hotlap.core.terminal import is_terminal, say, write


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(stress)


def stress(
    kills: int = typer.Option(
        50, min=1, max=100_000, metavar="N", help="Trainings to kill at random moments, in and between saves."
    ),
    every_call: bool = typer.Option(False, "--every-call", help="Also kill around every system call of a save."),
    workers: int = typer.Option(1, min=0, max=64, metavar="N", help="Loader workers in every third training."),
    seconds: float = typer.Option(600.0, "--seconds", min=1, metavar="SECONDS", help="Most seconds to spend."),
    seed: int = typer.Option(0, min=0, max=2**63 - 1, metavar="N", help="Seed of the random moments."),
    as_json: bool = typer.Option(False, "--json", help="Print the figures as JSON."),
) -> None:
    """Kill trainings, resume them, and compare the results.

    hotlap also damages their files, and compares each result with that of an undisturbed training, bit by bit.
    """
    from hotlap.stress.trials import Tally, Trials

    begun = time.monotonic()
    rounds: list[Trials] = []
    is_live = sys.stderr is not None and is_terminal(sys.stderr)

    def total(name: str) -> int:
        return sum(getattr(trials.tally, name) for trials in rounds)

    def in_time() -> bool:
        if is_live:
            told = f"kills {total('kills')}, bit-equal {total('equal')} of {total('trials')}"
            with contextlib.suppress(OSError, ValueError):
                write(sys.stderr, f"\r{told}   ")
        return time.monotonic() - begun < seconds

    try:
        rounds.append(plain := Trials(seed=seed))
        if workers:
            rounds.append(Trials(seed=seed + 1, workers=workers))
        moments = plain.moments() if every_call else {}
        for event, name in moments.items():
            if in_time():
                plain.at_call(event, name)
        wanted = total("trials") + kills
        number = 0
        while total("trials") < wanted and in_time():
            rounds[-1 if number % 3 == 2 else 0].at_random()
            number += 1
    finally:
        for trials in rounds:
            trials.close()
    if is_live:
        say("")
    figures: dict[str, Any] = {name: total(name) for name in Tally.__annotations__ if name != "lost"}
    lost = [line for trials in rounds for line in trials.tally.lost]
    # A test cut short is not the one that was asked for.
    figures["asked"] = kills + len(moments)
    figures["seconds"] = round(time.monotonic() - begun, 1)
    if as_json:
        show_json(figures | {"lost": lost})
    else:
        show(*_told(figures, lost))
    if lost or not figures["trials"]:
        raise typer.Exit(1)


def _told(figures: dict[str, Any], lost: list[str]) -> list[str]:
    short = figures["trials"] < figures["asked"]
    return [
        f"kills {figures['kills']} in {figures['trials']} trainings, damaged files {figures['damages']}, "
        f"resumes {figures['resumes']}, begun again at step 0 {figures['anew']} (killed before a first checkpoint)",
        f"lost {len(lost)}",
        f"bit-equal {figures['equal']} of {figures['trials']}",
        *([f"stopped after {figures['seconds']} s; {figures['asked']} trainings were asked for"] if short else []),
        *(f"  - {line}" for line in lost),
    ]
