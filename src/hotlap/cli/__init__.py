"""The `hotlap` command: parse, call, print.

Exit codes: 0 done; 1 not fit, or failed with a message; 2 bad command line; 130 interrupted; 143 terminated.
Commands import what they need when they run, so that `--help` answers at once.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from hotlap import __version__
from hotlap.cli import kit, machine, recipes, reports, run, store, stress, trainings, watch
from hotlap.cli.output import show
from hotlap.core.errors import HotlapError, UsageError
from hotlap.core.terminal import clean_lines, say

MOST_COLUMNS = 200
"""Help fills a terminal up to this width; click itself stops at 80."""


class _Commands(TyperGroup):
    def make_context(self, *args: Any, **settings: Any) -> Any:
        """Read the command line up to the name of the command."""
        with _harmless_messages():
            return super().make_context(*args, **settings)

    def invoke(self, ctx: Any) -> Any:
        """Run a command. typer would end an interrupted one without a word, or with another exit code."""
        try:
            with _harmless_messages():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            say("hotlap: interrupted")
            raise typer.Exit(130) from None


@contextmanager
def _harmless_messages() -> Iterator[None]:
    """Escape what a terminal obeys in errors that typer shows: typer itself escapes ASCII and C1 only."""
    try:
        yield
    except Exception as error:
        message = getattr(error, "message", None)
        if isinstance(message, str) and not isinstance(error, HotlapError):
            error.message = clean_lines(message)  # type: ignore[attr-defined]
        raise


app = typer.Typer(
    name="hotlap",
    cls=_Commands,
    help="Makes PyTorch training fast by measuring.",
    epilog="Exit codes: 0 done; 1 not fit, or failed with a message; 2 bad command line; "
    "130 interrupted; 143 terminated.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": MOST_COLUMNS},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        show(f"hotlap {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
    ),
) -> None:
    """Makes PyTorch training fast by measuring."""


run.register(app)
recipes.register(app)
trainings.register(app)
watch.register(app)
reports.register(app)
kit.register(app)
machine.register(app)
stress.register(app)
store.register(app)


def main() -> None:
    """Run the command; print hotlap's own errors as a line and nothing else."""
    code, begin = 0, None
    try:
        try:
            # Not app(): that puts a hook of typer's in the place of sys.excepthook, which a script may have use for.
            typer.main.get_command(app)(obj=recipes.OWN_PROCESS)
        except run.ToRun as script:
            begin = script.begin
        finally:
            if begin is None:
                gc.freeze()  # python's last collection may take seconds: it looks at all that libraries have made
        if begin is not None:  # behind the handler: to the script, nothing was raised before it
            code = begin()
    except HotlapError as error:
        say(*f"hotlap: {error}".split("\n"))
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except KeyboardInterrupt:
        say("hotlap: interrupted")
        sys.exit(130)
    except Exception as error:
        if isinstance(error, OSError) and traceback.extract_tb(error.__traceback__)[-1].name == "echo":
            # Help, or what is wrong with a command line: typer writes them by itself.
            say(f"hotlap: cannot write to the terminal or file: {error.strerror}")
            sys.exit(getattr(error.__context__, "exit_code", 1))
        if sys.excepthook is not sys.__excepthook__:  # a script's own
            raise
        # As python shows it, but for what a terminal would obey.
        say(*"".join(traceback.format_exception(error)).rstrip("\n").split("\n"))
        sys.exit(1)
    if code < 0:
        from hotlap.script.running import end_by

        end_by(-code)
    sys.exit(code)
