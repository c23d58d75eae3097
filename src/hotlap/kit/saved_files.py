"""Files of the user's that a script writes, replaces or removes while it is looked at: all are put back afterwards.

Python tells of each such call before it is made (`sys.addaudithook`), and what a file held is kept then. What C++
writes by itself, as `torch.save` does, has to be told. New files stay, but for saved weights and what is made of them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hotlap.core.errors import TrainingError

INDEX = "saved.jsonl"
MOST_COPIED_BYTES = 2**30
"""What is opened to be changed in place has to be copied; a larger file is data as a rule, and is left alone."""
_NO_FILES = (Path("/dev"), Path("/proc"), Path("/sys"))


class SavedFiles:
    """In the script's process: keeps what was there before it is written to."""

    def __init__(self, folder: Path, *ignored: Path) -> None:
        """Files are kept in `folder`; what is in it, or in those that are `ignored`, is nobody's."""
        self._folder = folder
        self._ignored = {*_NO_FILES, *(one.resolve() for one in (folder, *ignored))}
        self._numbers = itertools.count()
        self._known = set[Path]()
        """Files whose state before was seen."""
        self._new = set[Path]()
        """Files and folders that are the script's own: they were not there before."""
        self._saved = set[Path]()
        """Files with weights that it has saved."""
        self._moved = set[Path]()
        """Folders that were moved, by their new names."""
        self._linked = set[str]()
        """What tells files apart that are kept by another name of theirs."""
        self._within = threading.local()
        self._heard: dict[str, Callable[..., None]] = {
            "open": self._opens,
            "os.link": self._names,
            "os.mkdir": self._makes,
            "os.remove": self._removes,
            "os.rename": self._renames,
            "os.symlink": self._links,
            "os.truncate": self._truncates,
            "shutil.copyfile": self._copies,
            "shutil.rmtree": self._clears,
        }

    def listen(self) -> None:
        """From now on, for as long as this process lives."""
        names, hear = frozenset(self._heard), self.hear

        def heard(event: str, args: tuple[Any, ...]) -> None:
            if event in names:  # of most, as of each `id`, nothing is to be kept, and no time is to be lost
                hear(event, args)

        sys.addaudithook(heard)

    def hear(self, event: str, args: tuple[Any, ...]) -> None:
        """Told what is about to be done. What cannot be kept is not done: an error is raised."""
        with self._alone() as is_own:
            if not is_own:
                self._settle()
                self._heard[event](*args)

    def before(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A function that saves weights, without a word to Python, to the file that is its second argument."""

        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            file = args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("filename"))
            name = file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", None)
            if isinstance(name, (str, os.PathLike)):
                with self._alone():
                    self._settle()
                    self._saves(_target(name))
            return original(*args, **kwargs)

        return save

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Inside, this thread hears nothing of what it does itself; whether it is inside already."""
        before = getattr(self._within, "is_own", False)
        self._within.is_own = True
        try:
            yield before
        except OSError as error:
            raise TrainingError(
                f"what the script writes to cannot be kept as it is before: {error}; "
                f"make room in {self._folder.parent}, or name another place with HOTLAP_CACHE"
            ) from error
        finally:
            self._within.is_own = before

    # --- what is about to be done ------------------------------------------------------------------

    def _opens(self, path: Any, mode: Any, flags: int) -> None:
        if not flags & (os.O_WRONLY | os.O_RDWR) or isinstance(path, int):
            return
        place = _target(path)
        # What may not be written to is not; and an empty file, often a lock of others, has nothing to lose.
        with contextlib.suppress(OSError):  # it is not there
            if not place.stat().st_size or not os.access(place, os.W_OK):
                self._known.add(place)
        self._keep(place, self._move if flags & os.O_TRUNC else self._copy)
        self._part_from_kept(place)

    def _truncates(self, path: Any, length: int) -> None:
        if not isinstance(path, int):  # which was opened before
            self._keep(place := _target(path), self._copy)
            self._part_from_kept(place)

    def _removes(self, path: Any, folder: int = -1) -> None:
        self._keep(_place(path, folder), self._link)

    def _makes(self, path: Any, mode: int, folder: int = -1) -> None:
        place = _place(path, folder)
        if not os.path.lexists(place) and not self._is_ignored(place):
            self._new.add(place)
            self._note("made", place)

    def _clears(self, path: Any, folder: int | None = None) -> None:
        place = _place(path, -1 if folder is None else folder)
        if _is_folder(place) and not self._is_own(place):
            self._note("was", place, kept := self._room())
            try:
                place.rename(kept)
            except OSError:  # another disk
                shutil.copytree(place, part := _part(kept), symlinks=True)
                part.rename(kept)
            else:
                place.mkdir()
            self._forget(place)
            self._new.add(place)  # whatever is left there is kept already

    def _renames(self, source: Any, target: Any, from_folder: int = -1, to_folder: int = -1) -> None:
        here, there = _place(source, from_folder), _place(target, to_folder)
        identity, is_own, is_folder = _identity(here), self._is_own(here), _is_folder(here)
        is_kept = is_folder and (not is_own or any(here in one.parents for one in self._saved | self._moved))
        if here == there:
            return
        if is_kept:
            self._note("moved", here, there, identity)
        elif not is_folder:
            self._keep(there, self._link)
            self._keep(here, self._link)

        def settle() -> None:
            if _identity(there) != identity or _identity(here) == identity:
                return  # it has failed
            if is_kept:
                self._forget(here)
                self._forget(there)
                self._moved.add(there)
            elif is_folder:
                self._new.add(there)
            elif here in self._saved or not is_own:
                self._saves(there)

        self._within.unsettled = settle

    def _copies(self, source: Any, target: Any) -> None:
        """A copy of what was saved goes with it."""
        if _target(source) in self._saved:
            self._saves(_target(target))

    def _links(self, source: Any, target: Any, *folders: int) -> None:
        """So does a link to it."""
        there = _place(target)
        if not os.path.lexists(there) and {_target(source), _target(there.parent / os.fsdecode(source))} & self._saved:
            self._saves(there)

    def _names(self, source: Any, target: Any, from_folder: int = -1, to_folder: int = -1) -> None:
        """By another name of its own a file can be written to as well."""
        if not self._is_own(here := _place(source, from_folder)):
            self._keep(here, self._link)
        self._links(source, target)

    # --- what is done before -----------------------------------------------------------------------

    def _settle(self) -> None:
        """Look at what has come of what this thread was about to do before this."""
        settle, self._within.unsettled = getattr(self._within, "unsettled", None), None
        if settle is not None:
            settle()

    def _saves(self, place: Path) -> None:
        if _is_folder(place):
            return  # which will fail
        self._keep(place, self._move)
        self._part_from_kept(place)
        if place in self._new:
            self._new.discard(place)
            self._note("new", place)
        self._saved.add(place)

    def _keep(self, place: Path, by: Callable[[Path, Path], None]) -> None:
        if place in self._known or self._is_ignored(place):
            return
        self._known.add(place)
        try:
            status = place.lstat()
        except OSError:
            self._new.add(place)
            return
        is_file = stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)
        if not is_file or not self._new.isdisjoint(place.parents):
            return
        if by == self._copy and status.st_size > MOST_COPIED_BYTES:
            self._note("left", place)
            return
        # Known before it is moved: whatever happens to this process, it finds its way back.
        self._note("was", place, kept := self._room())
        try:
            by(place, kept)
        except FileNotFoundError:
            if os.path.lexists(place):
                raise  # else somebody else was first to remove it

    def _move(self, place: Path, kept: Path) -> None:
        """For what is written anew."""
        try:
            place.rename(kept)
        except OSError:  # another disk
            _copy_whole(place, kept)

    def _copy(self, place: Path, kept: Path) -> None:
        """For what is changed in place."""
        self._move(place, kept)
        if not os.path.lexists(place):  # the file itself may have other names, by which it is kept too
            shutil.copy2(kept, place)

    def _link(self, place: Path, kept: Path) -> None:
        """For what loses its name."""
        try:
            os.link(place, kept, follow_symlinks=False)
        except OSError:
            _copy_whole(place, kept)
        else:
            self._linked.add(_identity(kept))

    def _part_from_kept(self, place: Path) -> None:
        """A file that is kept and has a name still: by that, what is kept would be written to."""
        if _identity(place) in self._linked:
            shutil.copy2(place, copied := place.with_name(f"{place.name}.{os.getpid()}.part"), follow_symlinks=False)
            copied.replace(place)

    def _room(self) -> Path:
        return self._folder / f"before-{os.getpid()}-{next(self._numbers)}"

    def _note(self, *words: str | Path) -> None:
        """What is about to be done, where, and what belongs to it."""
        with (self._folder / INDEX).open("a", encoding="utf-8") as index:
            index.write(json.dumps([str(word) for word in words]) + "\n")

    # --- whose is it -------------------------------------------------------------------------------

    def _is_ignored(self, place: Path) -> bool:
        return not self._ignored.isdisjoint(place.parents) or place.parent.name == "__pycache__"

    def _is_own(self, place: Path) -> bool:
        return place in self._saved or place in self._new or not self._new.isdisjoint(place.parents)

    def _forget(self, place: Path) -> None:
        """What is at this place from now on, and below it, is another thing."""
        for several in (self._known, self._new, self._saved):
            several -= {one for one in several if one.is_relative_to(place)}


def _target(path: Any) -> Path:
    """From the root, all links followed."""
    return Path(os.path.realpath(os.fsdecode(path)))


def _place(path: Any, folder: int = -1) -> Path:
    """The same, but for a link that it is itself."""
    name = Path(os.fsdecode(path))
    if folder >= 0:
        name = Path(f"/proc/self/fd/{folder}") / name
    return _target(name.parent) / name.name


def _is_folder(place: Path) -> bool:
    return place.is_dir() and not place.is_symlink()


def _identity(place: str | Path) -> str:
    """What tells a file or folder from all others, whatever its name; nothing where there is none."""
    try:
        status = os.lstat(place)
    except OSError:
        return ""
    return f"{status.st_dev} {status.st_ino}"


def _part(kept: Path) -> Path:
    return kept.with_name(f"{kept.name}.part")


def _copy_whole(place: Path, kept: Path) -> None:
    """Nothing or all of it."""
    shutil.copy2(place, part := _part(kept), follow_symlinks=False)
    part.rename(kept)


# --- afterwards ------------------------------------------------------------------------------------------


def put_back(folder: Path) -> list[str]:
    """Leave all files as they were before, last things first; those that could not be kept, as they are too large.

    Raises OSError where one cannot be put back; all others are.
    """
    left, errors = [], []
    for what, place, *more in reversed(_noted(folder)):
        if what == "left":
            left.append(place)
            continue
        try:
            _undo(what, Path(place), *more)
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return left


def _undo(what: str, path: Path, other: str = "", identity: str = "") -> None:
    """One thing, if it was done: each was noted before, and may have failed."""
    if what == "new":
        if os.path.lexists(path) and not _is_folder(path) and _place(path) == path:  # by no link that was made since
            path.unlink()
    elif what == "made":
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    elif os.path.lexists(other) and (what == "was" or _identity(other) == identity):
        path.parent.mkdir(parents=True, exist_ok=True)  # the script may have cleared it away
        _clear(path)
        shutil.move(other, path)


def bring_back(folder: Path) -> list[str]:
    """Put back what a look kept that was killed, perhaps long ago; what was done, in lines.

    What is in a file's place by now may be the user's: it stays, and what was kept is put beside it.
    """
    lines = []
    for what, place, *other in reversed(_noted(folder)):
        path = Path(place)
        if what == "moved" and _identity(other[0]) == other[1]:
            lines.append(f"{place} was renamed to {other[0]} by a look that was killed")
        if what != "was" or not os.path.lexists(other[0]):
            continue
        if os.path.lexists(path):
            path = next(one for one in _names_beside(path) if not os.path.lexists(one))
            lines.append(f"{place} may be of a look that was killed; what it was before is {path}")
        else:
            lines.append(f"{place} is put back, which a look that was killed had left elsewhere")
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(other[0], path)
    return lines


def holds_files(folder: Path) -> bool:
    """Whether any that were kept are still there."""
    return any(what == "was" and os.path.lexists(other[0]) for what, _, *other in _noted(folder))


def _names_beside(path: Path) -> Iterator[Path]:
    return (path.with_name(f"{path.name}.before-look{f'-{turn}' if turn else ''}") for turn in itertools.count())


def _noted(folder: Path) -> list[list[str]]:
    index = folder / INDEX
    lines = index.read_text(encoding="utf-8").splitlines() if index.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("]")]  # a killed process may leave half a line


def _clear(path: Path) -> None:
    if _is_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
