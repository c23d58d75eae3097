"""A cache on disk, keyed by data, code and parameters: checked on every read; damaged entries are made again."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotlap.core.errors import StoreError, first_line, shown
from hotlap.core.terminal import logger
from hotlap.store import disk
from hotlap.store.disk import Piece
from hotlap.store.encoding import decode, encode, to_json
from hotlap.store.files import from_json
from hotlap.store.keys import key_of
from hotlap.store.manifest import Manifest, check_files, read_files, read_manifest, write_folder
from hotlap.store.tensors import MOST_HEADER_BYTES, NAMES, tensor_pieces, tensors_from

__all__ = ["Cache", "CacheEntry", "Damage", "Item", "default_root", "key_of", "make_private"]

log = logger(__name__)

LEFT_OVER_S = 3600.0
"""An unfinished folder older than this belongs to a process that died."""
_KIND = re.compile(r"[a-z][a-z0-9-]{0,31}")
_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Item:
    """An entry in a list; its files were not checked."""

    kind: str
    key: str
    path: Path
    bytes: int
    used_s: float
    """Time of the last read or write, in seconds since 1970."""
    facts: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Damage:
    """An entry that changed since it was written."""

    path: Path
    why: str


Items = list[Item]
Damages = list[Damage]


def default_root() -> Path:
    """HOTLAP_CACHE, else hotlap's folder under XDG_CACHE_HOME, else under ~/.cache."""
    if named := os.environ.get("HOTLAP_CACHE"):
        return Path(named).absolute()
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (shared if shared.is_absolute() else Path.home() / ".cache") / "hotlap"
    except RuntimeError:
        raise StoreError("there is no home folder for the cache; name a folder with HOTLAP_CACHE") from None


class Cache:
    """A folder of entries, `kind/key/`. Any number of processes may use it at once.

    Raises StoreError if other users can write to it, since they could change what a training computes.
    """

    def __init__(self, root: str | Path | None = None) -> None:
        self.root = Path(root).absolute() if root is not None else default_root()
        if os.path.lexists(self.root):
            refuse_shared(self.root)

    def get(self, kind: str, key: str, *, on_disk: bool = False) -> CacheEntry | None:
        """The entry, or None. hotlap removes a damaged entry with a warning and returns None.

        With `on_disk`, hotlap checks every byte, and tensors then read from disk on access.
        """
        path = self._place(kind, key)
        if not os.path.lexists(path):
            return None
        refuse_shared(self.root, path.parent)
        try:
            manifest = _own_manifest(kind, key, path)
            if on_disk:
                check_files(path, manifest)
                small = {name: file for name, file in manifest.files.items() if name != TENSORS}
                files = read_files(path, replace(manifest, files=small))
                entry = content_from(kind, key, files, manifest.facts, tensors=path / TENSORS)
            else:
                entry = content_from(kind, key, read_files(path, manifest), manifest.facts)
        except StoreError as error:
            log.warning("removed the damaged cache entry %s %s: %s", kind, key[:12], error)
            self._remove(path)
            return None
        with contextlib.suppress(OSError):  # a read-only cache keeps no order of use
            os.utime(path, follow_symlinks=False)
        return entry

    def get_or_warn(self, kind: str, key: str, *, on_disk: bool = False) -> CacheEntry | None:
        """The entry, or None, also where the cache cannot be used: then the log says so."""
        try:
            return self.get(kind, key, on_disk=on_disk)
        except StoreError as error:
            log.warning("hotlap does not use the cached %s: %s", kind, error)
            return None

    def replace(
        self, kind: str, key: str, *, tensors: Arrays | None = None, values: Any = None, facts: Mapping[str, Any]
    ) -> CacheEntry:
        """As `put`, but in the place of an entry with this key."""
        self.drop(kind, key)
        return self.put(kind, key, tensors=tensors, values=values, facts=facts)

    def put(
        self, kind: str, key: str, *, tensors: Arrays | None = None, values: Any = None, facts: Mapping[str, Any]
    ) -> CacheEntry:
        """Store an entry and return it as `get` would. A complete entry with this key stays as it is.

        `values` are texts, numbers, arrays, tensors, and lists, tuples and dicts of them; `facts` are JSON for
        people. Raises StoreError if the disk is full or a value is of another kind.
        """
        path = self._place(kind, key)
        files, entry = content_of(kind, key, tensors or {}, values, facts)
        try:
            make_private(self.root, path.parent)
            new = path.with_name(f".new-{key}-{secrets.token_hex(8)}")
            write_folder(new, {"kind": kind, "key": key}, files, facts, lambda: self._settle(new, path))
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(f"cannot store in the cache {self.root}: {error.strerror or error}") from error
        return entry

    def get_or_make(
        self, kind: str, key: str, make: Callable[[], tuple[Arrays, Any]], facts: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], Any]:
        """Tensors and values of the entry; if there is none, `make` computes them and the cache keeps them.

        If the cache cannot store them, the log says so and work goes on.
        """
        if (found := self.get(kind, key)) is not None:
            return found.tensors, found.values
        tensors, values = make()
        try:
            made = self.put(kind, key, tensors=tensors, values=values, facts=facts or {})
        except StoreError as error:
            log.warning("the cache does not keep the %s: %s", kind, error)
            return dict(tensors), values
        return made.tensors, made.values

    @contextlib.contextmanager
    def scratch(self, kind: str, key: str) -> Iterator[Path]:
        """A temporary folder for making an entry, removed at the end; `prune` removes those of dead processes."""
        path = self._place(kind, key)
        new = path.with_name(f".new-{key}-{secrets.token_hex(8)}")
        try:
            make_private(self.root, path.parent)
            new.mkdir(mode=0o700)
        except OSError as error:
            raise StoreError(f"cannot store in the cache {self.root}: {error.strerror or error}") from error
        try:
            yield new
        finally:
            shutil.rmtree(new, ignore_errors=True)

    def drop(self, kind: str, key: str) -> None:
        """Remove an entry, if there is one."""
        path = self._place(kind, key)
        if os.path.lexists(path):
            refuse_shared(self.root, path.parent)
            self._remove(path)

    def list(self, kind: str | None = None) -> Items:
        """All entries, the most recently used first."""
        return sorted((_item(path) for path in self._entries(kind)), key=lambda item: item.used_s, reverse=True)

    def size(self, kind: str | None = None) -> int:
        """Bytes of all entries."""
        return sum(item.bytes for item in self.list(kind))

    def verify(self, kind: str | None = None, *, remove: bool = False) -> Damages:
        """Check every byte of every entry; return the damaged ones, and remove them with `remove`."""
        found = []
        for path in self._entries(kind):
            try:
                check_files(path, _own_manifest(path.parent.name, path.name, path))
            except StoreError as error:
                found.append(Damage(path=path, why=str(error)))
                if remove:
                    self._remove(path)
        return found

    def prune(self, keep_bytes: int | None = None, older_than_s: float | None = None, kind: str | None = None) -> Items:
        """Remove entries unused for `older_than_s` seconds, then the least recently used beyond `keep_bytes`.

        Leftovers of dead processes go too. Returns the removed entries in that order.
        """
        self._remove_left_overs()
        found, now, removed = self.list(kind), time.time(), []
        held = sum(item.bytes for item in found)
        for item in reversed(found):
            too_old = older_than_s is not None and now - item.used_s > older_than_s
            if too_old or (keep_bytes is not None and held > keep_bytes):
                self._remove(item.path)
                removed.append(item)
                held -= item.bytes
        return removed

    # --- folders -----------------------------------------------------------------------------------

    def _place(self, kind: str, key: str) -> Path:
        if not _KIND.fullmatch(kind) or not _KEY.fullmatch(key):
            raise StoreError(f"{shown(kind)}, {shown(key)} do not name a cache entry; make the key with key_of")
        return self.root / kind / key

    def _settle(self, new: Path, path: Path) -> None:
        """Rename a finished entry to its final name, unless another process was first."""
        new.chmod(0o700)
        for _ in range(100):
            try:
                disk.rename(new, path)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
            try:
                check_files(path, _own_manifest(path.parent.name, path.name, path))
            except StoreError:
                self._remove(path)
            else:
                shutil.rmtree(new, ignore_errors=True)
                return
        raise StoreError(f"{path} cannot be replaced")

    def _remove(self, path: Path) -> None:
        """Remove an entry under another name, so that no reader finds half of it."""
        doomed = path.with_name(f".old-{path.name}-{secrets.token_hex(8)}")
        try:
            disk.rename(path, doomed)
            if doomed.is_symlink() or not doomed.is_dir():
                doomed.unlink()
            else:
                disk.remove_folder(doomed)
        except FileNotFoundError:  # another process was first
            return
        except OSError as error:
            raise StoreError(f"cannot remove {path}: {error.strerror or error}") from error

    def _kinds(self, kind: str | None) -> Iterator[Path]:
        if os.path.lexists(self.root):
            refuse_shared(self.root)
            for folder in _within(self.root, _KIND):
                if folder.is_dir() and not folder.is_symlink() and kind in (None, folder.name):
                    refuse_shared(folder)
                    yield folder

    def _entries(self, kind: str | None) -> Iterator[Path]:
        for folder in self._kinds(kind):
            yield from _within(folder, _KEY)

    def _remove_left_overs(self) -> None:
        for folder in self._kinds(None):
            for path in _within(folder, re.compile(r"\.(new|old)-[0-9a-f]{64}-[0-9a-f]{16}")):
                with contextlib.suppress(OSError):
                    if time.time() - path.lstat().st_mtime > LEFT_OVER_S and not path.is_symlink():
                        shutil.rmtree(path, ignore_errors=True)


def make_private(*folders: Path) -> None:
    """Make nested folders for their owner only, whatever the umask.

    Raises StoreError, with the remedy, if a folder exists and others can write to it, and OSError.
    """
    folders[0].parent.mkdir(parents=True, exist_ok=True)
    for folder in folders:
        folder.mkdir(mode=0o700, exist_ok=True)
        refuse_shared(folder)


def refuse_shared(*folders: Path) -> None:
    """Raise StoreError, with the remedy, if a folder is a link, has another owner, or others can write to it."""
    for folder in folders:
        try:
            status = folder.lstat()
        except OSError as error:
            raise StoreError(f"cannot use the cache {folder}: {error.strerror or error}") from None
        if not stat.S_ISDIR(status.st_mode):
            kind = "a link" if stat.S_ISLNK(status.st_mode) else "not a folder"
            raise StoreError(f"the cache {folder} is {kind}; name a folder with HOTLAP_CACHE")
        if status.st_uid != os.geteuid():
            raise StoreError(f"the cache {folder} belongs to another user; name your own with HOTLAP_CACHE")
        if status.st_mode & 0o022:
            raise StoreError(f"others can write to the cache {folder}; to fix this: chmod go-w {folder}")


def _within(folder: Path, name: re.Pattern[str]) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if name.fullmatch(path.name))
    except OSError as error:
        raise StoreError(f"cannot read the cache {folder}: {error.strerror or error}") from error


def _own_manifest(kind: str, key: str, path: Path) -> Manifest:
    refuse_shared(path)
    manifest = read_manifest(path)
    if manifest.name != {"kind": kind, "key": key}:
        raise StoreError("its manifest belongs to another entry")
    return manifest


def _item(path: Path) -> Item:
    kind, key = path.parent.name, path.name
    used_s, size, facts = 0.0, 0, {}
    with contextlib.suppress(OSError):  # removed, or damaged, which `verify` reports
        used_s = path.lstat().st_mtime
        manifest = _own_manifest(kind, key, path)
        size, facts = manifest.bytes, manifest.facts
    return Item(kind=kind, key=key, path=path, bytes=size, used_s=used_s, facts=facts)


# ---
# The content of an entry as files and back: tensors, arrays and plain values; nothing that could run code.


Arrays = Mapping[str, Tensor | np.ndarray[Any, Any]]
TENSORS, VALUES, INNER = "tensors.safetensors", "values.json", "values.safetensors"


@dataclass(frozen=True, kw_only=True)
class CacheEntry:
    """The stored content, checked byte for byte: arrays as arrays, tensors as tensors on the CPU."""

    kind: str
    key: str
    tensors: dict[str, Any]
    values: Any
    facts: dict[str, Any]


def content_of(
    kind: str, key: str, tensors: Arrays, values: Any, facts: Mapping[str, Any]
) -> tuple[dict[str, Iterable[Piece]], CacheEntry]:
    """The files of an entry, and the entry as `get` returns it; StoreError names a value that no safe file can hold."""
    plain = {name: _as_tensor(name, value) for name, value in tensors.items()}
    inner: dict[str, Tensor] = {}
    arrays = [name for name, value in tensors.items() if isinstance(value, np.ndarray)]
    try:
        coded = encode(values, inner, "values")
        text = to_json({"arrays": arrays, "values": coded})
    except StoreError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"the values cannot be stored: {error}") from None
    entry = CacheEntry(
        kind=kind, key=key, tensors=_given_back(plain, arrays), values=decode(coded, inner), facts=dict(facts)
    )
    return {TENSORS: tensor_pieces(plain), VALUES: [text], INNER: tensor_pieces(inner)}, entry


def content_from(
    kind: str, key: str, files: Mapping[str, bytes], facts: dict[str, Any], *, tensors: Path | None = None
) -> CacheEntry:
    """The entry in these files; StoreError if they are not those of an entry.

    If its tensors stay on disk, `tensors` is the path of their file, which is then not among `files`.
    """
    if {*files, *([TENSORS] if tensors else [])} != {TENSORS, VALUES, INNER}:
        raise StoreError(f"its files are {', '.join(files) or 'none'}, not those of an entry")
    found = tensors_from(files[TENSORS], TENSORS) if tensors is None else mapped(tensors)
    inner = tensors_from(files[INNER], INNER)
    stored = from_json(files[VALUES], VALUES)
    try:
        arrays, coded = list(stored["arrays"]), stored["values"]
        values = decode(coded, inner)
        return CacheEntry(kind=kind, key=key, tensors=_given_back(found, arrays), values=values, facts=facts)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise StoreError(f"{VALUES} does not have hotlap's format ({type(error).__name__})") from None


def _given_back(tensors: Mapping[str, Tensor], arrays: list[str]) -> dict[str, Any]:
    return {name: value.numpy() if name in arrays else value for name, value in tensors.items()}


def _as_tensor(name: str, value: Tensor | np.ndarray[Any, Any]) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    try:
        # Copied in its shape: ascontiguousarray makes a scalar a row, and torch needs a writable array.
        return torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape).copy())
    except (TypeError, ValueError, AttributeError) as error:
        raise StoreError(f"{name} cannot be stored as a tensor: {first_line(error)}") from None


# ---
# Tensors that stay in their file: the system reads pages on access and drops them when memory is short.


_DTYPES = {name: dtype for dtype, name in NAMES.items()}


def mapped(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, mapped; writing to them never changes the file.

    The file may be removed meanwhile: its bytes stay until the last tensor goes. The caller checks the bytes. Raises
    StoreError if it is not a safetensors file.
    """
    try:
        # A private map: torch accepts it, and the file never changes.
        raw = torch.from_numpy(np.memmap(path, np.uint8, mode="c"))
    except (OSError, ValueError) as error:
        raise StoreError(f"{path.name} cannot be mapped: {error}") from None
    try:
        header_bytes = int.from_bytes(bytes(raw[:8].tolist()), "little")
        if not 0 < header_bytes <= min(MOST_HEADER_BYTES, len(raw) - 8):
            raise ValueError("the length of its header is wrong")
        header = json.loads(raw[8 : 8 + header_bytes].numpy().tobytes())
        header.pop("__metadata__", None)
        body = raw[8 + header_bytes :]
        return {name: _part(body, **entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise StoreError(f"{path.name} is not a valid safetensors file: {first_line(error)}") from None


def _part(body: Tensor, *, dtype: str, shape: list[int], data_offsets: list[int]) -> Tensor:
    start, end = data_offsets
    return body[start:end].view(_DTYPES[dtype]).reshape(shape)


KIND = "models"


def model_key(identity: Mapping[str, Any], initial: Mapping[str, Tensor]) -> str:
    """The key of a training: its `guard.identity` and all initial weights."""
    return key_of("a trained model", identity, initial)


def stored_model(cache: Cache, key: str) -> tuple[dict[str, Tensor], Any] | None:
    """Weights and figures of a model trained before, or None; the log reports a damaged entry."""
    found = cache.get(KIND, key)
    return None if found is None else (found.tensors, found.values)


def store_model(cache: Cache, key: str, tensors: Mapping[str, Tensor], values: Any, facts: Mapping[str, Any]) -> None:
    """Store a trained model: its weights for plain PyTorch, and figures such as history and best.

    If the cache cannot store it, the log says so and nothing stops.
    """
    try:
        cache.put(KIND, key, tensors=tensors, values=values, facts=facts)
    except StoreError as error:
        log.warning("the trained model is not kept in the cache: %s", error)
