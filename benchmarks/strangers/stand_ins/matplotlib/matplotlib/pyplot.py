"""Takes every call and draws nothing; `savefig` writes an empty file."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def savefig(name: str, **_: Any) -> None:
    """Leave a file, as the real one does."""
    Path(name).touch()


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *_, **__: None
