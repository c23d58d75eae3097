"""The `hotlap` command: parse, call, print.

Exit codes: 0 done; 1 not fit, or failed with a message; 2 the command line makes no sense;
130 interrupted. Commands import what they need when they run, so that `--help` stays instant.
"""

from __future__ import annotations

import sys

import typer

from hotlap import __version__
from hotlap.cli import demo, machine
from hotlap.core.errors import HotlapError

app = typer.Typer(
    name="hotlap",
    help="Makes PyTorch training fast by measuring.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"hotlap {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
    ),
) -> None:
    """Makes PyTorch training fast by measuring."""


machine.register(app)
demo.register(app)


def main() -> None:
    """Run the command; print hotlap's own errors as a line and nothing else."""
    try:
        app()
    except HotlapError as error:
        print(f"hotlap: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("hotlap: interrupted", file=sys.stderr)
        sys.exit(130)
