"""Where pictures lie: folders of classes, and the paths of a table, which may not lead elsewhere."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from hotlap.core.errors import DataError, shown
from hotlap.recipes.options import is_file

SUFFIXES = (".jpg", ".jpeg", ".png")
OTHERS = (".webp", ".gif", ".bmp", ".tif", ".tiff", ".heic", ".avif", ".jp2", ".dcm")
"""How files of pictures are named that are not decoded."""
PATH, CLASS = "path", "class"
"""The columns of a table that is made of a folder."""
LOOKED_AT = 20
"""Paths by which it is found where all of them begin."""
LEVELS, MOST_ENTRIES = 2, 20_000
"""How many levels and entries hotlap searches for a folder that is not named."""


def folder_columns(folder: Path) -> tuple[dict[str, list[str]], list[str]] | None:
    """The files of a folder of pictures as columns of words, in order of name, and notes; None where it is none.

    With folders in it, each is a class, and all files within are its own; without, there is no class. What begins with
    a dot is not looked at.
    """
    inner = sorted(one for one in folder.iterdir() if one.is_dir() and not one.name.startswith("."))
    loose = sorted(one.name for one in folder.iterdir() if one.is_file() and not one.name.startswith("."))
    unread: list[OSError] = []
    files = [(file, one.name) for one in inner for file in _within(one, unread.append)]
    if any(is_picture(file) for file, _ in files):
        paths = {PATH: [str(file.relative_to(folder)) for file, _ in files], CLASS: [name for _, name in files]}
        beside = [f"{len(loose):,} files beside the folders of classes are left out, as {loose[0]}"] if loose else []
        locked = (
            [f"{len(unread):,} folders cannot be read, as {unread[0].filename}: {unread[0].strerror}"] if unread else []
        )
        known = {*paths[CLASS], *(Path(error.filename).name for error in unread)}
        empty = [one.name for one in inner if one.name not in known]
        return paths, beside + locked + ([f"{len(empty):,} folders hold no file, as {empty[0]}"] if empty else [])
    if any(is_picture(Path(name)) for name in loose):
        return {PATH: loose}, []
    return None


def is_picture(path: Path) -> bool:
    """Whether a name is that of a picture."""
    return path.suffix.lower() in SUFFIXES


def undecoded_in(folder: Path) -> str:
    """A picture in a folder, or in one within it, that is not decoded; "" where there is none."""
    names = (file.relative_to(folder) for file in _within(folder))
    return str(next((name for name in names if name.suffix.lower() in OTHERS), ""))


def files_named(
    paths: Sequence[str], table: Path, root: str, say: Callable[[str], None], *, is_asked: bool
) -> list[str]:
    """The files that a table's paths name, "" where there is none; DataError where no file is there."""
    files = placed(paths, table, root, is_asked=is_asked)
    first = next(((path, file) for path, file in zip(paths, files, strict=True) if path), ("", ""))
    if not any(is_file(file) for file in files if file):
        _refuse_if_elsewhere(first[0], table, root, is_asked=is_asked)
        _refuse_if_nowhere(paths, files, table, is_asked=is_asked)
    elif is_asked:
        _warn_of_namesakes(*first, table, root, say)
    return files


def placed(paths: Sequence[str], table: Path, root: str, *, is_asked: bool = False) -> list[str]:
    """The files that a table's paths name; "" where there is none.

    They begin at `root`, or at the folder of the table: where one of the first is found; the table's own folder comes
    first where it `is_asked` about, since the root is that of a training. None may lead out of `root`, or, where there
    is none or the table lies elsewhere, out of the table's own folder: DataError. One that has no ending may be that of
    a picture without it.
    """
    first = list(islice(filter(None, paths), LOOKED_AT))
    base, limit = _place(first, folder_of(table), root, is_asked=is_asked)
    outside = [path for path in paths if path and not _is_within(limit, base, path)]
    if outside:
        count = f"{len(outside):,} paths of {table} lead" if len(outside) > 1 else f"a path of {table} leads"
        cure = "give one that holds them all" if root else "name the folder that pictures may be read from"
        cure = f"put {table.name} into a folder that holds them all" if is_asked else f"{cure} with --root"
        raise DataError(f"{count} out of {limit}, as {shown(outside[0])}; {cure}")
    return [str(_found(base, path) or base / path) if path else "" for path in paths]


def from_one_folder(paths: Sequence[str]) -> tuple[Path, list[str]]:
    """Paths that may lie anywhere: the folder that holds them all, and the paths from there; "" stays."""
    files = [Path(path).absolute() if path else None for path in paths]
    base = Path(os.path.commonpath([file.parent for file in files if file] or [Path().absolute()]))
    return base, [str(file.relative_to(base)) if file else "" for file in files]


def folder_of(table: Path) -> Path:
    """Where the paths of a table begin, without --root."""
    return table if table.is_dir() else table.parent


def elsewhere(path: str, table: Path, root: str) -> tuple[Path, Path] | None:
    """A folder in which a path would be found, and the file: one beside the table or in the root, or within these."""
    looked_at, found = 0, [Path(root), folder_of(table)] if root else [folder_of(table)]
    for _ in range(LEVELS):
        inner: list[Path] = []
        for folder in found:
            try:
                with os.scandir(folder) as entries:
                    some = list(islice(entries, MOST_ENTRIES - looked_at))
                    inner += [Path(one.path) for one in some if one.is_dir() and not one.name.startswith(".")]
            except OSError:  # one that may not be looked into
                continue
            looked_at += len(some)
        # Of train/ and test/ the first is that of train.csv.
        found = sorted(inner, key=lambda one: (table.stem not in one.name, one))
        held = ((one, file) for one in found if (file := _found(one, path)) is not None)
        if one := next(held, None):
            return one
    return None


def _refuse_if_elsewhere(path: str, table: Path, root: str, *, is_asked: bool) -> None:
    """Raise DataError where the first of files of which none is there is in a folder near by, which it names."""
    found = elsewhere(path, table, root) if path else None
    if found is not None:
        folder, file = found
        where = root if root and not is_asked else folder_of(table)
        ending = "" if is_picture(Path(path)) else ", whose ending may be left out"
        cure = f"move {table.name} into {folder}" if is_asked else f"say --root {shlex.quote(str(folder))}"
        raise DataError(f"{table} names {shown(path)}, which is not in {where}: it is {file}{ending}; {cure}")


def _refuse_if_nowhere(paths: Sequence[str], files: Sequence[str], table: Path, *, is_asked: bool) -> None:
    """Raise DataError where nothing is there under any of the names."""
    named = [(path, file) for path, file in zip(paths, files, strict=True) if path]
    if not named or any(os.path.lexists(file) for _, file in named):
        return
    path, file = named[0]
    cure = f"put them beside {table.name}" if is_asked else "name the folder that paths begin at with --root"
    cure = "write / in place of \\ in paths" if "\\" in path else cure
    count = f"none of the {len(named):,} files" if len(named) > 1 else "the file"
    there = "is there" if len(named) > 1 else "is not there"
    raise DataError(f"{count} that {table} names {there}, as {shown(path)}, which would be {shown(file, 120)}; {cure}")


def _warn_of_namesakes(path: str, file: str, table: Path, root: str, say: Callable[[str], None]) -> None:
    """Pictures to predict may have the names of those trained on."""
    if root and is_file(file) and not file.startswith(str(folder_of(table) / path)):
        found = elsewhere(path, table, "")
        if found is not None and not found[1].samefile(file):
            say(
                f"warning   pictures of {table} are read from {root}, the root of the training; "
                f"if those in {found[0]} are meant, move {table.name} into it"
            )


def _place(first: Sequence[str], own: Path, root: str, *, is_asked: bool) -> tuple[Path, Path]:
    """Where paths begin, and what they may not lead out of."""
    if not root:
        return own, own
    # The last is for a table that lies elsewhere, as one to predict may, with its pictures beside it.
    places = [(Path(root), Path(root)), (own, Path(root)), (own, own)]
    places = places[1:] + places[:1] if is_asked else places
    inside = [place for place in places if any(_is_within(place[1], place[0], path) for path in first)]
    held = [
        (base, limit)
        for base, limit in inside
        if any(_is_within(limit, base, path) and _found(base, path) for path in first)
    ]
    return next(iter(held or inside or places))


def _is_within(limit: Path, base: Path, path: str) -> bool:
    """Whether a path, as it is written, stays in a folder; where links lead is the user's own business."""
    whole = os.path.normpath(limit.absolute())
    return os.path.commonpath([whole, os.path.normpath(base.absolute() / path)]) == whole


def _found(base: Path, path: str) -> Path | None:
    """A file that is there, by its name or by its name without an ending."""
    wanted = base / path
    if is_file(wanted):
        return wanted
    if is_picture(wanted):
        return None
    names = (wanted.with_name(f"{wanted.name}{suffix}") for suffix in SUFFIXES if wanted.name)
    return next((one for one in names if is_file(one)), None)


def _within(folder: Path, on_error: Callable[[OSError], None] | None = None) -> list[Path]:
    """All files of a folder and below, in order of name; `on_error` is called for unreadable folders."""
    found = []
    for here, folders, names in os.walk(folder, onerror=on_error):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(here) / name for name in sorted(names) if not name.startswith(".")]
    return found
