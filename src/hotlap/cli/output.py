"""What a command prints: its results on stdout, all else on stderr."""

from __future__ import annotations

import json
import sys
from typing import Any

from hotlap.core import terminal
from hotlap.core.errors import StoreError


def show(*lines: object) -> None:
    """Print results on stdout, a line each; StoreError where they cannot be written.

    A reader that has closed the pipe wants no more of them: that is no error.
    """
    if sys.stdout is None:
        return
    try:
        terminal.write(sys.stdout, "".join(f"{terminal.clean(str(line))}\n" for line in lines))
    except BrokenPipeError:
        pass
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise StoreError(f"cannot write the results to stdout: {why}") from None


def show_json(value: Any, indent: int | None = None) -> None:
    """Print a value as JSON."""
    show(*json.dumps(value, indent=indent).split("\n"))
