"""Files that a script saves while it is looked at: those it had before are put back, and new ones taken away."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

INDEX = "saved.jsonl"


class SavedFiles:
    """In the script's process: keeps what a file held before `torch.save` writes to it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._known = folder, set[str]()

    def before(self, original: Callable[..., None]) -> Callable[..., None]:
        """A `torch.save` that does so."""

        @functools.wraps(original)
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(f, (str, os.PathLike)):
                self._keep(str(Path(f).absolute()))
            original(obj, f, *args, **kwargs)

        return save

    def _keep(self, path: str) -> None:
        if path in self._known:
            return
        self._known.add(path)
        kept = self._folder / f"before-{len(self._known)}" if os.path.lexists(path) else None
        # Known before it is moved: whatever happens to this process, it finds its way back.
        with (self._folder / INDEX).open("a", encoding="utf-8") as index:
            index.write(json.dumps([path, kept and str(kept)]) + "\n")
        if kept is not None:
            shutil.move(path, kept)


def put_back(folder: Path) -> None:
    """Leave all files that were saved as they were before."""
    index = folder / INDEX
    lines = index.read_text(encoding="utf-8").splitlines() if index.is_file() else []
    for path, kept in map(json.loads, lines):
        if kept is None:
            Path(path).unlink(missing_ok=True)
        elif os.path.lexists(kept):
            Path(path).parent.mkdir(parents=True, exist_ok=True)  # the script may have cleared it away
            Path(path).unlink(missing_ok=True)
            shutil.move(kept, path)
