"""Filters of warnings around hotlap's own work, in a process whose warnings belong to the user."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal


@contextmanager
def filtered(
    action: Literal["ignore", "always"] = "ignore", message: str = "", category: type[Warning] = Warning
) -> Iterator[None]:
    """Inside, apply `action` to warnings of this category whose text begins with the pattern `message`.

    Unlike `warnings.catch_warnings`, this leaves Python's record of shown warnings valid. With a new record Python
    shows each warning of the user's code once more.
    """
    entry = (action, re.compile(message, re.IGNORECASE) if message else None, category, None, 0)
    before = warnings.filters
    before.insert(0, entry)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for filters in (before, warnings.filters):  # code inside may have put another list there
            filters[:] = [one for one in filters if one is not entry]  # type: ignore[index]


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Inside, the texts of all warnings go into the list and are not shown."""
    found: list[str] = []
    shown = warnings.showwarning
    with filtered("always"):
        warnings.showwarning = lambda message, *_, **__: found.append(str(message))
        try:
            yield found
        finally:
            warnings.showwarning = shown
