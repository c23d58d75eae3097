"""One script under hotlap, from before its first line to after its last."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user asks of hotlap for one script."""

    name: str
    """Of the script, as words and the run folder show it."""
    plan: str | None = None
    """`auto` (None), `max`, a plan file or a run folder; `off` never comes here."""
    out: Path | None = None
    """The run folder; None: a fresh one under `runs/`."""
    tune_s: float | None = None
    """What tuning may cost at most, in seconds."""
    as_json: bool = False
    """Tell the table at the end as JSON."""


class Session:
    """Watches the training of this process while it is open, makes it faster, and tells at its end what it did.

    Nothing in here raises: where something goes wrong, the script goes on as it would without hotlap.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def start(self) -> None:
        """Watch from here on."""

    def stop(self) -> None:
        """Take everything back, write the run folder, and tell on stderr what was found; once."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
