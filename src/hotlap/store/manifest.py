"""A folder with a manifest that lists each file's size and hash: the format of checkpoints and cache entries."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotlap.core.errors import StoreError, shown
from hotlap.store import disk
from hotlap.store.encoding import to_json
from hotlap.store.files import from_json

FORMAT = 1
MANIFEST = "manifest.json"
MOST_MANIFEST_BYTES = 16 * 1024 * 1024
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\.(safetensors|json)")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a valid manifest."""

    name: dict[str, Any]
    """`step` of a checkpoint; `kind` and `key` of a cache entry."""
    files: dict[str, tuple[int, str]]
    """Size and sha256 of each file."""
    facts: dict[str, Any]

    @property
    def bytes(self) -> int:
        """The total size of all files."""
        return sum(size for size, _ in self.files.values())


def write_folder(
    new: Path,
    name: Mapping[str, Any],
    files: Mapping[str, Iterable[disk.Piece]],
    facts: Mapping[str, Any],
    place: Callable[[], None],
) -> None:
    """Fill the new folder `new`, sync it, and let `place` rename it.

    On any error hotlap removes `new`. Raises OSError.
    """
    try:
        disk.make_folder(new)
        listed = {}
        for file, pieces in files.items():
            size, digest = disk.write_new(new / file, pieces)
            listed[file] = {"bytes": size, "sha256": digest}
        manifest = {"format": FORMAT, **name, "files": listed, "facts": dict(facts)}
        disk.write_new(new / MANIFEST, [to_json(manifest | {"sha256": _digest(manifest)})])
        disk.sync_folder(new)
        place()
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder, checked; StoreError says what is wrong."""
    if folder.is_symlink() or not folder.is_dir():
        raise StoreError(f"{folder.name} is not a folder, or is a link")
    return checked(from_json(disk.read_small(folder / MANIFEST, MOST_MANIFEST_BYTES), MANIFEST))


def read_files(folder: Path, manifest: Manifest) -> dict[str, bytes]:
    """All files of a folder, checked byte for byte; StoreError says what is wrong."""
    return {name: _read(folder / name, size, sha256) for name, (size, sha256) in manifest.files.items()}


def check_files(folder: Path, manifest: Manifest) -> None:
    """Check as `read_files` does, without holding the files in memory."""
    for name, (size, sha256) in manifest.files.items():
        seen, digest = hash_file(folder / name, links=False)
        if seen != size:
            raise StoreError(f"{name} has {seen:,} bytes, not the {size:,} written")
        if digest != sha256:
            raise StoreError(f"{name} differs from what was written (sha256)")


def hash_file(path: Path, *, links: bool = True) -> tuple[int, str]:
    """Size and sha256 of a regular file, read in pieces; StoreError if it is no regular file."""
    digest, size = hashlib.sha256(), 0
    try:
        # Non-blocking: opening a pipe would wait forever for its other end.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW))
        with os.fdopen(handle, "rb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise StoreError(f"{path.name} is not a regular file")
            while piece := file.read(disk.CHUNK):
                digest.update(piece)
                size += len(piece)
    except FileNotFoundError:
        raise StoreError(f"{path.name} is missing") from None
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"{path.name} cannot be read: {error.strerror or error}") from None
    return size, digest.hexdigest()


def checked(manifest: Any) -> Manifest:
    """The content of a manifest; every part is checked, since the file may be untrusted."""
    if not isinstance(manifest, dict) or "sha256" not in manifest:
        raise StoreError(f"{MANIFEST} is not a manifest")
    rest = {k: v for k, v in manifest.items() if k != "sha256"}
    if rest.get("format") != FORMAT:
        raise StoreError(f"{MANIFEST} has format {shown(rest.get('format'))}; this hotlap reads {FORMAT}")
    if _digest(rest) != manifest["sha256"]:
        raise StoreError(f"{MANIFEST} differs from what was written (sha256)")
    files, facts = rest.get("files"), rest.get("facts")
    if not isinstance(files, dict) or not isinstance(facts, dict):
        raise StoreError(f"{MANIFEST} is not a manifest")
    listed = {}
    for name, entry in files.items():
        # Plain names only: none may lead out of the folder or to the manifest itself.
        if not _FILE.fullmatch(name) or name == MANIFEST:
            raise StoreError(f"{MANIFEST} lists {shown(name)}, which is not a plain file name")
        size = entry.get("bytes") if isinstance(entry, dict) else None
        if type(size) is not int or size < 0:
            raise StoreError(f"{MANIFEST} has no size for {name}")
        if not _SHA256.fullmatch(str(entry.get("sha256"))):
            raise StoreError(f"{MANIFEST} has no sha256 for {name}")
        listed[name] = (size, entry["sha256"])
    own = {k: v for k, v in rest.items() if k not in ("format", "files", "facts")}
    return Manifest(name=own, files=listed, facts=facts)


def _digest(manifest: Mapping[str, Any]) -> str:
    try:
        return hashlib.sha256(to_json(manifest)).hexdigest()
    except (ValueError, TypeError, RecursionError) as error:  # NaN, a set, or a list inside of itself
        raise StoreError(f"{MANIFEST} cannot be written as JSON: {error}") from None


def _read(path: Path, size: int, sha256: str) -> bytes:
    try:
        return disk.read_checked(path, size, sha256)
    except MemoryError:
        raise StoreError(f"{path.name} has {size:,} bytes, which do not fit in memory") from None
