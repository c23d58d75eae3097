"""`hotlap batch`, `workers`, `memory` and `diagnose`: questions about a training, answered by its own updates."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from hotlap.cli.output import show, show_json
from hotlap.core.errors import HotlapError
from hotlap.core.terminal import say

NAME = typer.Argument(
    None,
    metavar="TRAINING",
    help="train.py ARGS; -m MODULE ARGS; module:job (train:job is `job` in train.py); "
    "or a recipe with its options. Options behind it belong to the training.",
)
MODULE = typer.Option(False, "-m", help="TRAINING is a module, as for `python -m`.")
JSON = typer.Option(False, "--json", help="Print the result as JSON.")
QUIET = typer.Option(False, "--quiet", help="Show no progress.")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (batch, workers, memory, diagnose):
        app.command(context_settings={"allow_interspersed_args": False})(command)


@contextmanager
def _users_errors() -> Iterator[None]:
    """Show an error of the user's code by the lines of that code; an error in hotlap keeps its whole traceback."""
    try:
        yield
    except HotlapError:
        raise
    except Exception as error:
        lines = _own_lines(error)
        if not lines:
            raise
        say(*"".join(lines).rstrip("\n").split("\n"))
        raise typer.Exit(1) from None


def _own_lines(error: Exception) -> list[str]:
    """The lines of the user's code that led to an error; none if the error arose in hotlap."""
    from hotlap.monitor.live_tensors import is_users_file

    hotlaps = str(Path(__file__).parents[1])
    frames = traceback.extract_tb(error.__traceback__)
    last = max((at for at, frame in enumerate(frames) if frame.filename.startswith(hotlaps)), default=-1)
    own = [frame for frame in frames[last + 1 :] if is_users_file(frame.filename)]
    is_called = frames[last].filename.endswith("objective.py") and last < len(frames) - 1
    if not own and not is_called:
        return []
    message = traceback.format_exception_only(error)
    if own:
        return ["hotlap: the training raised an error:\n", *traceback.format_list(own), *message]
    return ["hotlap: the model or the loss does not accept the batches: ", *message]


def _print(found: Any, as_json: bool) -> None:
    if as_json:
        show_json(found.to_dict())
    else:
        show(*found.summary().split("\n"))


def batch(
    training: list[str] = NAME,
    module: bool = MODULE,
    most: int | None = typer.Option(None, min=1, max=2**31 - 1, metavar="N", help="Largest batch to try."),
    seconds: float = typer.Option(
        120.0, "--seconds", min=1.0, metavar="SECONDS", help="Start no new try after so many seconds."
    ),
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Find which batch fits and which is fastest.

    hotlap makes real updates with each size, and leaves the training as it was.
    """
    from hotlap.kit.calls import batch as find

    with _users_errors():
        found = find(_words(training, module), most=most, seconds=seconds, progress=not quiet)
    _print(found, as_json)


def workers(
    training: list[str] = NAME,
    module: bool = MODULE,
    seconds: float = typer.Option(
        120.0, "--seconds", min=1.0, metavar="SECONDS", help="Start no new try after so many seconds."
    ),
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Find how many loader workers pay, if any.

    hotlap times real updates with each number of workers, and with batches gathered, copied ahead and held.
    """
    from hotlap.kit.calls import workers as find

    with _users_errors():
        found = find(_words(training, module), seconds=seconds, progress=not quiet)
    _print(found, as_json)


def memory(
    training: list[str] = NAME,
    module: bool = MODULE,
    seconds: float = typer.Option(
        120.0, "--seconds", min=1.0, metavar="SECONDS", help="Most seconds to wait for a script's first update."
    ),
    picture: Path | None = typer.Option(
        None, metavar="FILE", help="A new .svg file, for a drawing of memory over one update."
    ),
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Show what holds the memory of an update.

    hotlap also shows what would lower the peak, and whether memory grows.
    """
    from hotlap.kit.calls import memory as find
    from hotlap.recipes.answers import check_name

    if picture is not None:
        check_name(picture, "picture", (".svg",))
    with _users_errors():
        found = find(_words(training, module), seconds=seconds, progress=not quiet)
    if picture is not None:
        found.draw(picture)
    _print(found, as_json)


def on_every_gpu(training: list[str] | None, module: bool, *, seconds: float, as_json: bool, quiet: bool) -> None:
    """Show the predicted times of a training on each GPU of the catalogue: `hotlap gpus --job`."""
    from hotlap.kit.calls import gpus as find

    with _users_errors():
        found = find(_words(training, module), seconds=seconds, progress=not quiet)
    _print(found, as_json)


def diagnose(
    training: list[str] = typer.Argument(
        None,
        metavar="TRAINING|RUN|PID",
        help="train.py ARGS; -m MODULE ARGS; module:job; a recipe with its options; the folder of a run; "
        "or a running process by its number. Options behind it belong to the training.",
    ),
    module: bool = MODULE,
    seconds: float = typer.Option(
        60.0, "--seconds", min=1.0, metavar="SECONDS", help="Most seconds to watch and to try, after the first update."
    ),
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Find what is wrong with a training, and what to change.

    The costliest comes first. hotlap watches some updates of a training as it is, in a copy of its folder.
    """
    from hotlap.monitor.aftermath import diagnose_named

    words = _words(training, module)
    found = diagnose_named(words[0]) if len(words) == 1 else None  # which needs no torch
    if found is None:
        from hotlap.kit.calls import diagnose as find

        with _users_errors():
            found = find(words, seconds=seconds, progress=not quiet)
    if as_json:
        show_json(found.to_dict())
    else:
        show(*found.summary().split("\n"), wrap=False)


def _words(training: list[str] | None, module: bool) -> list[str]:
    return [*(["-m"] if module else []), *(training or [])]
