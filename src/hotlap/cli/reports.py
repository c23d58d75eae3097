"""`hotlap report`, `runs`, `compare`, `diff`, `serve`, `checklist` and `cheatsheet`: what runs came to."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hotlap.cli.output import show, show_json
from hotlap.core.errors import UsageError
from hotlap.core.terminal import columns, say

if TYPE_CHECKING:
    from hotlap.report.document import Check
    from hotlap.report.reading import RunFiles

_RUN = typer.Argument(metavar="RUN", help="The folder of the run.")
_JSON = typer.Option(False, "--json", help="Print one JSON object and nothing else.")
RUNS, WIDTH = Path("runs"), 100
"""The usual folder of runs, and the columns of what is no terminal."""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (report, runs, compare, diff, serve, checklist, cheatsheet):
        app.command()(command)


def report(
    run: Path = _RUN,
    out: Path | None = typer.Option(
        None, metavar="FILE", help="The file to write: .html, .md or .json; by default report.html in the run's folder."
    ),
    against: list[Path] = typer.Option(
        [], metavar="RUN", help="A run to compare with: learning curves show the band of all that are given."
    ),
    open_it: bool = typer.Option(False, "--open", help="Open the page in the browser."),
    as_json: bool = _JSON,
) -> None:
    """Write the report of a run: one page that needs nothing else.

    It is made of the run's files alone. With --json hotlap prints the same and writes no file.
    """
    from hotlap.report.reading import read_run
    from hotlap.report.rendering import PAGE, write
    from hotlap.report.sections import report_on

    made = report_on(read_run(run), [read_run(one) for one in against])
    if as_json:
        show_json(made.to_dict(), indent=1)
        return
    written = write(made, out if out is not None else run / PAGE)
    show(made.headline, written)
    if open_it:
        open_page(written.resolve().as_uri())


def open_page(address: str) -> None:
    """Open an address in the browser; a machine without one gets a line."""
    import webbrowser

    opened = False
    with suppress(Exception):
        opened = webbrowser.open(address)
    if not opened:
        say(f"hotlap: no browser opened; open {address}")


def runs(
    folder: Path = typer.Argument(RUNS, metavar="FOLDER", help="The folder of the runs."),
    as_json: bool = _JSON,
) -> None:
    """List the runs of a folder: kind, score, time and plan.

    The newest comes first.
    """
    from hotlap.report.rendering import words_of
    from hotlap.report.runs import list_runs, runs_table

    listed = list_runs(folder)
    if as_json:
        show_json({"folder": str(folder), "runs": [one.to_dict() for one in listed]}, indent=1)
        return
    if not listed:
        show(f"no runs in {folder}")
    heads = _aligned([[words_of(row[at]) for at in (0, 1, 2, 4, 5, 7)] for row in runs_table(listed).rows])
    for head, one in zip(heads, listed, strict=True):
        plan = f"plan  {one.plan}" if one.plan else ""
        show(head, *(part for line in (one.score, plan) if line for part in _below(line)))


def compare(
    groups: list[str] = typer.Argument(
        metavar="RUN RUN …", help="Runs; several of one training with other seeds count as one group: a,b,c d,e,f."
    ),
    as_json: bool = _JSON,
) -> None:
    """Compare runs: which differences are real, and which are noise.

    One run each shows only what has an interval of its own. Groups of runs with other seeds tell more.
    """
    from hotlap.report.comparing import compare as differences_of
    from hotlap.report.comparing import comparison_table
    from hotlap.report.rendering import words_of

    if len(groups) < 2:
        raise UsageError("name two runs or more; runs of one group are joined by commas: a,b,c d,e,f")
    if len(set(groups)) < len(groups):
        raise UsageError("a run is named twice; name each run or group once")
    named = [_group(words) for words in groups]
    if len({name for name, _ in named}) < len(named):
        named = [(words, runs) for words, (_, runs) in zip(groups, named, strict=True)]
    found = differences_of(named)
    if as_json:
        show_json({"differences": [one.to_dict() for one in found]}, indent=1)
        return
    if not found:
        show("these runs have no figure in common")
    rows = [[words_of(cell) for cell in row] for row in comparison_table(found).rows]
    for pair in dict.fromkeys((row[1], row[3]) for row in rows):
        inner = [row for row in rows if (row[1], row[3]) == pair]
        head, *lines = _aligned(
            [["", *pair, "difference", "verdict"], *([r[0], r[2], r[4], r[5], r[6]] for r in inner)]
        )
        show(head)
        for line, row in zip(lines, inner, strict=True):
            show(line, *_below(row[7]))


def _group(words: str) -> tuple[str, list[RunFiles]]:
    """The runs that a word names: a folder, several joined by commas, or a folder of runs."""
    from hotlap.report.reading import MANY, kind_of_run, read_run, runs_in

    whole = Path(words)
    if whole.exists() or "," not in words:
        if whole.is_dir() and kind_of_run(whole) in (None, MANY) and (inner := runs_in(whole)):
            return whole.name, [read_run(path) for path in inner]
        return whole.name or words, [read_run(whole)]
    paths = [Path(part) for part in words.split(",") if part]
    if not paths or len({path.resolve() for path in paths}) < len(paths):
        raise UsageError(f"{words!r} {'names a run twice' if paths else 'names no run'}; join other runs: a,b,c")
    return ",".join(path.name for path in paths), [read_run(path) for path in paths]


def diff(run: Path = _RUN, as_json: bool = _JSON) -> None:
    """Show what hotlap changed in a run, as you would write it.

    For a script the output is a diff that `patch` takes. Below "write by hand" are lines that have no certain place in
    it. For a run of `fit` or a recipe the output is lines of PyTorch. Nothing is written.
    """
    from hotlap.report.by_hand import by_hand
    from hotlap.report.reading import read_run

    found = by_hand(read_run(run))
    if as_json:
        show_json({"run": str(run), "trainings": [one.to_dict() for one in found]}, indent=1)
        return
    for number, one in enumerate(found):
        show(*[""] * bool(number), *one.comments(), wrap=False)
        show(*one.diff.split("\n")[:-1], wrap=False, tabs=True)


def serve(
    folder: Path = typer.Argument(RUNS, metavar="FOLDER", help="The folder of the runs."),
    port: int = typer.Option(8017, min=0, max=65535, metavar="N", help="The port; 0 takes any that is free."),
    open_it: bool = typer.Option(False, "--open", help="Open the page in the browser."),
    as_json: bool = typer.Option(False, "--json", help="Print the address as JSON."),
) -> None:
    """Show the runs of a folder in the browser, those at work too.

    On this machine only, and read-only. Ctrl-C ends it.
    """
    from hotlap.report.serving import Server

    with Server(folder, port) as server:
        if as_json:
            show_json({"address": server.address, "folder": str(folder)})
        else:
            show(f"{folder} on {server.address}; Ctrl-C ends it")
        if open_it:
            open_page(server.address)
        with suppress(KeyboardInterrupt):
            server.serve_forever()


def checklist(
    run: Path | None = typer.Argument(None, metavar="RUN", help="The folder of a run; without it, this machine."),
    as_json: bool = _JSON,
) -> None:
    """Check what can be checked before, during and after a training.

    Without a run hotlap checks this machine, as before a training. With a run it reads what the run's files show.
    """
    from hotlap.report.checks import checks_of
    from hotlap.report.reading import read_run

    found = _machine_checks() if run is None else checks_of(read_run(run))
    if as_json:
        show_json({"checks": [vars(check) for check in found]}, indent=1)
        return
    for check in found:
        show(f"{check.outcome:<7}  {check.when:<6}  {check.what}: {check.found}")
    if run is None:
        show("", "during and after a training: hotlap checklist RUN")


def _machine_checks() -> list[Check]:
    """This machine before a training: the doctor's verdict and problems."""
    from hotlap.machine import examine
    from hotlap.report.checks import BEFORE, LOOK, OK
    from hotlap.report.document import Check

    seen = examine(None, require_gpu=False)
    checks = [Check(when=BEFORE, what="this machine", outcome=OK if seen.fit else LOOK, found=seen.verdict)]
    for problem in seen.problems:
        said = f"{problem.costs}; {problem.do}" if problem.do else problem.costs
        checks.append(Check(when=BEFORE, what=problem.what, outcome=LOOK, found=said))
    formats = [f"{name} {fact.support}" for name, fact in (seen.facts or seen.cpu_facts).items()]
    checks.append(Check(when=BEFORE, what="number formats", outcome=OK, found=", ".join(formats)))
    return checks


def cheatsheet(
    context: typer.Context,
    folder: Path = typer.Argument(RUNS, metavar="FOLDER", help="Runs whose measured gains are listed."),
    as_json: bool = _JSON,
) -> None:
    """Print the commands, the moves, and what moves gave here.

    Gains are from the ledgers of the runs in a folder, and from nothing else.
    """
    from hotlap.core.tricks import MOVE_WORDS
    from hotlap.report.gains import gains_in

    parent: Any = context.parent.command if context.parent is not None else None
    commands = {name: one.get_short_help_str(200) for name, one in parent.commands.items() if name != "cheatsheet"}
    trainings, gains = gains_in(folder) if folder.is_dir() else (0, [])
    if as_json:
        found = [gain.to_dict() for gain in gains]
        show_json({"commands": commands, "moves": dict(MOVE_WORDS), "trainings": trainings, "gains": found}, indent=1)
        return
    show("Commands", *_pairs({f"hotlap {name}": words for name, words in commands.items()}), "")
    show("Moves, by the names that --without takes", *_pairs(dict(MOVE_WORDS)), "")
    if gains:
        show(f"Measured in {trainings} trainings under {folder}", *_pairs({gain.move: gain.words for gain in gains}))
    else:
        show(f"Measured gains: no tuned training under {folder} yet")


def _pairs(named: dict[str, str]) -> list[str]:
    """Names with words behind them, in lines that break below the words."""
    width, longest = columns(sys.stdout) or WIDTH, max(map(len, named), default=0)
    lines = []
    for name, words in named.items():
        first, *rest = textwrap.wrap(words, max(20, width - longest - 4)) or [""]
        lines += [f"  {name:<{longest}}  {first}", *(f"  {'':<{longest}}  {line}" for line in rest)]
    return lines


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Cells below each other; columns that are empty in all rows are left out."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    used = [at for at, width in enumerate(widths) if width]
    return ["  ".join(row[at].ljust(widths[at]) for at in used).rstrip() for row in rows]


def _below(line: str) -> list[str]:
    """A line below a row, in the width of the terminal."""
    width = columns(sys.stdout) or WIDTH
    return textwrap.wrap(line, max(20, width), initial_indent="    ", subsequent_indent="    ")
