"""What a command prints: its results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import sys
from typing import Any

from hotlap.core import terminal
from hotlap.core.errors import StoreError


def show(*lines: object, wrap: bool = True, tabs: bool = False) -> None:
    """Print results on stdout, a line each, and between words in more where a terminal is too narrow for it.

    `tabs` keeps the tabs of source code.

    Raises StoreError if it cannot write them. A closed pipe is no error: its reader wants no more.
    """
    if sys.stdout is None:
        return
    try:
        texts = [_with_tabs(str(line)) if tabs else terminal.clean(str(line)) for line in lines]
        fitted = terminal.fitted(texts, sys.stdout) if wrap else texts
        terminal.write(sys.stdout, "".join(f"{line}\n" for line in fitted))
    except BrokenPipeError:
        pass
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise StoreError(f"cannot write the results to stdout: {why}") from None


def _with_tabs(line: str) -> str:
    return "\t".join(map(terminal.clean, line.split("\t")))


def show_json(value: Any, indent: int | None = None) -> None:
    """Print a value as JSON."""
    show(*json.dumps(value, indent=indent).split("\n"), wrap=False)
