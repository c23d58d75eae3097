"""`hotlap stress`: kill trainings on purpose and see whether anything is lost."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(stress)


def stress(
    kills: int = typer.Option(50, min=1, help="Kills at random moments, in and between saves."),
    every_call: bool = typer.Option(False, "--every-call", help="Also kill around every system call of a save."),
    workers: int = typer.Option(1, min=0, help="Loader workers in every third training; 0 for none."),
    seconds: float = typer.Option(600.0, min=1, help="Stop after so many seconds."),
    seed: int = typer.Option(0, min=0, help="Decides where the kills fall."),
    as_json: bool = typer.Option(False, "--json", help="Print the figures as JSON."),
) -> None:
    """Kill trainings, harm their files, resume them, and compare each with the undisturbed one, bit by bit."""
    from hotlap.stress.trials import Tally, Trials

    begun = time.monotonic()
    plain, working = Trials(seed=seed), Trials(seed=seed + 1, workers=workers) if workers else None
    tallies = [plain.tally, *([working.tally] if working else [])]

    def total(name: str) -> int:
        return sum(getattr(tally, name) for tally in tallies)

    def show() -> None:
        told = f"kills {total('kills')}, bit-equal {total('equal')} of {total('trials')}"
        if sys.stderr.isatty():
            print(f"\r{told}   ", end="", file=sys.stderr, flush=True)

    try:
        if every_call:
            for _ in plain.at_every_call():
                show()
                if time.monotonic() - begun > seconds:
                    break
        number, wanted = 0, total("kills") + kills
        while total("kills") < wanted and time.monotonic() - begun < seconds:
            (working if working and number % 3 == 2 else plain).at_random()
            number += 1
            show()
    finally:
        plain.close()
        if working:
            working.close()
    if sys.stderr.isatty():
        print(file=sys.stderr)
    figures: dict[str, Any] = {name: total(name) for name in Tally.__annotations__ if name != "lost"}
    lost = [line for tally in tallies for line in tally.lost]
    print(
        json.dumps(figures | {"lost": lost, "seconds": time.monotonic() - begun}) if as_json else _told(figures, lost)
    )
    if lost or not figures["trials"]:
        raise typer.Exit(1)


def _told(figures: dict[str, Any], lost: list[str]) -> str:
    return "\n".join(
        [
            f"kills {figures['kills']}, damaged files {figures['damages']}, resumes {figures['resumes']}, "
            f"begun anew {figures['anew']} (killed before their first checkpoint)",
            f"lost {len(lost)}",
            f"bit-equal {figures['equal']} of {figures['trials']}",
            *(f"  - {line}" for line in lost),
        ]
    )
