"""A run folder as one zip file for another machine; unpacking never writes outside of its folder."""

from __future__ import annotations

import io
import lzma
import os
import secrets
import shutil
import stat
import struct
import unicodedata
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from hotlap.core.errors import StoreError, first_line, shown
from hotlap.core.units import GIB, MIB, show_bytes
from hotlap.store import disk
from hotlap.store.files import write_atomically
from hotlap.store.run_folder import RunFolder

MOST_BYTES = 64 * GIB
MOST_ENTRIES = 10_000
MOST_DIRECTORY_BYTES = 16 * MIB
"""Python reads the list of entries as a whole; ten thousand entries need a tenth of this."""
MOST_RATIO, SMALL_BYTES = 1000, 100 * MIB
"""Beyond SMALL_BYTES no honest content is a thousand times larger than its archive."""
_BROKEN = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    NotImplementedError,
    RuntimeError,
    EOFError,
    ValueError,
    IndexError,
    OverflowError,
)


def pack(run: Path, archive: Path, *, checkpoints: bool = False) -> Path:
    """Write a run folder into a new compressed zip file, without checkpoints unless they are asked for.

    Only regular files are written: no links, and nothing that a crash left.
    """
    # A recipe's run holds the folders of its models, and no plan.
    folder = run if (run / "options.toml").is_file() else RunFolder.open(run).path
    if os.path.lexists(archive):
        raise StoreError(f"{archive} exists already; name another file or remove it")
    if archive.resolve().is_relative_to(folder.resolve()):
        raise StoreError(f"{archive} is inside of the run folder; name a file outside of it")
    if not archive.parent.is_dir():
        raise StoreError(f"cannot write {archive}: the folder {archive.parent} does not exist")

    def write(temporary: Path) -> None:
        with zipfile.ZipFile(temporary, "w", strict_timestamps=False) as file:
            for name, path in _files(folder, ""):
                if checkpoints or "checkpoints" not in Path(name).parts:
                    # Weights hardly shrink: at a higher level they take minutes for nothing.
                    level = 1 if path.suffix == ".safetensors" else None
                    file.write(path, name, compress_type=zipfile.ZIP_DEFLATED, compresslevel=level)

    write_atomically(archive, write)
    return archive


def checkpoint_bytes(run: Path) -> int:
    """The size of all checkpoints in a run folder, which `pack` leaves out."""
    return sum(path.stat().st_size for name, path in _files(run, "") if "checkpoints" in Path(name).parts)


def unpack(archive: Path, into: Path, *, most_bytes: int = MOST_BYTES) -> Path:
    """Unpack a zip file into a new or empty folder: everything or nothing.

    Before it writes anything, hotlap refuses with StoreError: names that lead out of the folder, links, devices, names
    that occur twice or differ only in case, encryption, more than 10,000 entries or `most_bytes`, and bombs.
    """
    _refuse_non_empty(into)
    new = into.with_name(f".new-{into.name}-{secrets.token_hex(8)}")
    try:
        with _opened(archive) as raw, zipfile.ZipFile(raw) as file:
            entries = _checked(file, os.fstat(raw.fileno()).st_size, most_bytes)
            free = shutil.disk_usage(new.parent).free
            if sum(entry.file_size for entry, _ in entries) > free:
                raise StoreError(f"{archive} needs more than the {show_bytes(free)} that are free in {new.parent}")
            new.mkdir()
            raw.most = None
            written = 0
            for entry, parts in entries:
                target = new.joinpath(*parts)
                if entry.is_dir():
                    target.mkdir(parents=True, exist_ok=True)
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                with file.open(entry) as content:
                    size, _ = disk.write_new(target, _limited(content, most_bytes - written))
                if size != entry.file_size:
                    raise StoreError(f"{shown(entry.filename)} has {size:,} bytes, not the {entry.file_size:,} listed")
                written += size
        disk.rename(new, into)
    except StoreError as error:
        raise StoreError(f"cannot unpack {archive}: {error}") from None
    except _BROKEN as error:
        raise StoreError(f"cannot unpack {archive}: it is not a complete zip file ({first_line(error)})") from None
    except OSError as error:
        raise StoreError(f"cannot unpack {archive} into {into}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return into


class _Bounded(io.BufferedReader):
    """A file that reads at most `most` bytes at once: zipfile reads the list of entries as a whole, however long."""

    most: int | None = MOST_DIRECTORY_BYTES

    def read(self, size: int | None = -1, /) -> bytes:
        if self.most is not None and size is not None and size > self.most:
            raise StoreError(f"its list of entries has {size:,} bytes; hotlap reads at most {self.most:,}")
        return super().read(size)


def _opened(archive: Path) -> _Bounded:
    handle = os.open(archive, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise StoreError("it is not a regular file")
    return _Bounded(io.FileIO(handle))


def _refuse_non_empty(into: Path) -> None:
    try:
        if into.is_symlink() or (into.exists() and not into.is_dir()):
            raise StoreError(f"{into} is not a folder; name a new one")
        if into.is_dir() and any(into.iterdir()):
            raise StoreError(f"the folder {into} is not empty; name a new one")
        if not into.name or not into.parent.is_dir():
            raise StoreError(f"cannot make the folder {into}; name a new one in an existing folder")
    except PermissionError as error:
        raise StoreError(f"cannot make the folder {into}: {error.strerror or error}") from None


def _checked(file: zipfile.ZipFile, archive_bytes: int, most_bytes: int) -> list[tuple[zipfile.ZipInfo, list[str]]]:
    """Every entry with the parts of its name; raises StoreError if one may not be written."""
    entries = file.infolist()
    if len(entries) > MOST_ENTRIES:
        raise StoreError(f"it has {len(entries):,} entries; hotlap unpacks at most {MOST_ENTRIES:,}")
    total = sum(entry.file_size for entry in entries)
    if total > most_bytes:
        raise StoreError(f"it would unpack to {show_bytes(total)}; hotlap unpacks at most {show_bytes(most_bytes)}")
    # Compared with the archive itself: the listed sizes may be wrong, and entries may overlap.
    if total > SMALL_BYTES and total > MOST_RATIO * archive_bytes:
        raise StoreError(f"its {show_bytes(archive_bytes)} would unpack to {show_bytes(total)}: it is a bomb")
    checked = [(entry, _parts(entry)) for entry in entries]
    _refuse_clashes([(parts, entry.is_dir()) for entry, parts in checked])
    return checked


def _parts(entry: zipfile.ZipInfo) -> list[str]:
    """The parts of an entry's name; raises StoreError if the name leads outside or the entry is no file or folder."""
    name = entry.orig_filename
    label = shown(name)
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise StoreError(f"{label} is a {'link' if kind == stat.S_IFLNK else 'device or pipe'}")
    if entry.flag_bits & 0x2041:
        raise StoreError(f"{label} is encrypted")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise StoreError(f"{label} is compressed by method {entry.compress_type}; hotlap reads only deflate")
    if name.startswith("/"):
        raise StoreError(f"{label} is an absolute path")
    parts = name.removesuffix("/").split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise StoreError(f"{label} leads out of the folder or is not a plain name")
    if "\\" in name or ":" in name or not name.isprintable():
        raise StoreError(f"{label} holds a character that file names must not hold")
    if len(parts) > 32 or any(len(part.encode()) > 200 for part in parts):
        raise StoreError(f"{label} is too long")
    return parts


def _refuse_clashes(names: list[tuple[list[str], bool]]) -> None:
    """Refuse a name that occurs twice, names that differ only in case, and a file that is also a folder."""
    seen: dict[str, str] = {}
    files: set[str] = set()
    folders: set[str] = set()
    for parts, is_folder in names:
        path = "/".join(parts)
        if path in files:
            raise StoreError(f"{shown(path)} occurs twice")
        for depth in range(1, len(parts) + 1):
            part = "/".join(parts[:depth])
            if seen.setdefault(unicodedata.normalize("NFC", part).casefold(), part) != part:
                raise StoreError(f"{shown(part)} occurs twice with different case")
            if depth < len(parts) or is_folder:
                folders.add(part)
        if not is_folder:
            files.add(path)
    if both := files & folders:
        raise StoreError(f"{shown(min(both))} is both a file and a folder")


def _limited(content: IO[bytes], most: int) -> Iterator[bytes]:
    while piece := content.read(disk.CHUNK):
        most -= len(piece)
        if most < 0:
            raise StoreError("it holds more than it lists")
        yield piece


def _files(folder: Path, within: str) -> Iterator[tuple[str, Path]]:
    """Every regular file with its path inside of the run folder; hidden files are leftovers of a crash."""
    try:
        here = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise StoreError(f"cannot read {folder}: {error.strerror or error}") from None
    for entry in here:
        if entry.name.startswith(".") or (not within and entry.name == "lock"):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _files(Path(entry.path), f"{within}{entry.name}/")
        elif entry.is_file(follow_symlinks=False):
            yield f"{within}{entry.name}", Path(entry.path)
