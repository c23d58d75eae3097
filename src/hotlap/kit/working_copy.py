"""Runs a script in a copy of its working folder, so that a probe leaves the user's files as they are.

`WorkingCopy` makes the copy: small files are copied, large files and large folders are links to the originals.
`WriteGuard` listens in the script's process. It puts a copy in the place of a link before the script writes to it, and
refuses to change a file that exists outside the copy. What programs write that the script starts, or libraries past
Python (HDF5, SQLite), it does not see: of that, only links and places outside the copy are at risk.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hotlap.core.errors import TrainingError

COPY = "copy"
"""The folder of a probe that the copy is in."""
MOST_FILE_BYTES = 16 * 2**20
"""Larger files are linked: the copy is made anew for each probe."""
MOST_BYTES = 256 * 2**20
"""Of all copied files; the others are linked."""
MOST_ENTRIES = 5_000
"""Of the copy; a folder that would bring more is linked as a whole."""


class WorkingCopy:
    """A copy of the current folder. It lies as deep as the original, between links to its siblings, for `..` in paths.

    Raises OSError if there is no room for it.
    """

    def __init__(self, folder: Path) -> None:
        """`folder` is for the probe."""
        self.root = (folder / COPY).resolve()
        here = Path.cwd()
        self.folder = self.root.joinpath(*here.parts[1:])
        self.folder.mkdir(parents=True)
        self._entries = self._bytes = 0
        for above, below in itertools.pairwise(reversed([here, *here.parents])):
            self._link_siblings(above, below)
        self._fill(here)

    def path_of(self, path: str) -> str:
        """Where a file of the working folder is in the copy; relative and other paths stay as they are."""
        here, place = Path.cwd(), _place(path)
        is_here = Path(path).is_absolute() and place.is_relative_to(here)
        return str(self.folder / place.relative_to(here)) if is_here else path

    def original(self, text: str) -> str:
        """A text that names files of the copy, with the names of the originals in their place."""
        return text.replace(str(self.root), "")

    def _link_siblings(self, above: Path, below: Path) -> None:
        place = self.root.joinpath(*above.parts[1:])
        with suppress(OSError):  # a folder that cannot be read
            for entry in _entries(above):
                if entry.name != below.name:
                    (place / entry.name).symlink_to(entry.path)

    def _fill(self, here: Path) -> None:
        """Copy folder after folder, the uppermost first, while there is room."""
        waiting = deque([(here, self.folder)])
        while waiting:
            folder, place = waiting.popleft()
            entries = _entries(folder) if os.access(folder, os.R_OK) else None
            if entries is None or (folder != here and self._entries + len(entries) > MOST_ENTRIES):
                place.symlink_to(folder)
                continue
            place.mkdir(exist_ok=True)
            self._entries += len(entries)
            for entry in entries:
                if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                    waiting.append((Path(entry.path), place / entry.name))
                else:
                    self._bring(entry, place / entry.name)

    def _bring(self, entry: os.DirEntry[str], place: Path) -> None:
        if entry.is_symlink():
            place.symlink_to(Path(entry.path).readlink())
            return
        size = entry.stat(follow_symlinks=False).st_size
        is_small = size <= min(MOST_FILE_BYTES, MOST_BYTES - self._bytes)
        if is_small and entry.is_file(follow_symlinks=False) and os.access(entry.path, os.R_OK):
            shutil.copy2(entry.path, place)
            self._bytes += size
        else:
            place.symlink_to(entry.path)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder, or as much of it as shows that it is too much."""
    with os.scandir(folder) as found:
        return list(itertools.islice(found, MOST_ENTRIES + 1))


class WriteGuard:
    """In the script's process: keeps it from changing a file that was there before, outside the copy."""

    def __init__(self, folder: Path, *others: Path) -> None:
        """`folder` holds the copy. The script may write to all files in it, in `others` and in caches of libraries."""
        self._copy = (folder / COPY).resolve()
        caches = (Path.home() / ".cache", Path.home() / ".triton", *map(Path, ("/dev", "/proc", "/sys")))
        self._free = {one.resolve() for one in (folder, *caches, *others)}
        (stamp := folder / "began").touch()
        self._began_ns = stamp.stat().st_ctime_ns
        self._heard: dict[str, Callable[..., None]] = {
            "open": self._opens,
            "os.link": self._links,
            "os.remove": self._removes,
            "os.rename": self._renames,
            "os.rmdir": self._removes,
            "os.truncate": self._writes,
        }

    def listen(self) -> None:
        """From now on, for as long as this process and its forks live."""
        heard = self._heard

        def hear(event: str, args: tuple[Any, ...]) -> None:
            if event in heard:
                heard[event](*args)

        sys.addaudithook(hear)

    def before_saving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A function that writes its second argument, a file, past Python: torch and safetensors save weights so."""

        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            file = args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("filename"))
            if isinstance(file, (str, os.PathLike)):
                self._writes(file, keeps=False)
            return original(*args, **kwargs)

        return save

    def _opens(self, path: Any, mode: Any, flags: int) -> None:
        if flags & (os.O_WRONLY | os.O_RDWR):
            self._writes(path, keeps=not (flags & os.O_TRUNC and flags & os.O_CREAT))

    def _writes(self, path: Any, *_: Any, keeps: bool = True) -> None:
        """Bring a linked file into the copy, empty unless `keeps`; refuse one that is elsewhere."""
        if isinstance(path, int):  # which was opened before
            return
        place = self._last_in_copy(path)
        if not self._is_free(place):
            # An empty file, often a lock, has nothing to lose.
            with suppress(FileNotFoundError):
                if place.stat().st_size and os.access(place, os.W_OK):
                    self._refuse_old(place)
        elif place.is_symlink() and not place.is_dir():
            source = Path(os.path.realpath(place))
            place.unlink()
            if keeps and source.exists():
                shutil.copy2(source, place)

    def _removes(self, path: Any, folder: int = -1) -> None:
        place = _place(path, folder)
        if not self._is_free(place):
            self._refuse_old(place)

    def _renames(self, source: Any, target: Any, from_folder: int = -1, to_folder: int = -1) -> None:
        self._removes(source, from_folder)
        self._removes(target, to_folder)

    def _links(self, source: Any, target: Any, from_folder: int = -1, to_folder: int = -1) -> None:
        """By a second name a file could be changed, too."""
        self._writes(_place(source, from_folder))

    def _refuse_old(self, place: Path) -> None:
        """Raise TrainingError for a file that the script has not made. No script can set the time of its change."""
        with suppress(FileNotFoundError):
            if place.lstat().st_ctime_ns < self._began_ns:
                raise TrainingError(
                    f"the script would change {place}, which hotlap cannot undo: it tries a script in a copy of its "
                    "working folder; let the script write elsewhere for this, or move that file away"
                )

    def _is_free(self, place: Path) -> bool:
        return not self._free.isdisjoint(place.parents) or place.parent.name == "__pycache__"

    def _last_in_copy(self, path: Any) -> Path:
        """Where a path leads, as far as its links stay in the copy."""
        place = _place(path)
        for _ in range(40):  # as many links as Linux follows
            if not place.is_symlink():
                break
            following = _place(place.parent / place.readlink())
            if not self._is_in_copy(following) and self._is_in_copy(place):
                break
            place = following
        return place

    def _is_in_copy(self, place: Path) -> bool:
        return self._copy in place.parents


def _place(path: Any, folder: int = -1) -> Path:
    """From the root, all links followed but one that it is itself."""
    name = Path(os.fsdecode(path))
    if folder >= 0:
        name = Path(f"/proc/self/fd/{folder}") / name
    return Path(os.path.realpath(name.parent)) / name.name
