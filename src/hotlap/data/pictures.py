"""Pictures decoded once: by all cores but one, with progress, into a file of pixels that is kept in the cache."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from hotlap.core.errors import DataError, StoreError, kind_of, listed, shown
from hotlap.core.job_checks import is_whole
from hotlap.core.terminal import logger
from hotlap.core.units import show_bytes, show_seconds
from hotlap.data.decoding import BrokenError, Fit, decode_into, fast_decoder, pillow, read
from hotlap.data.parallel import parallel_map
from hotlap.machine.limits import read_cpu
from hotlap.store.cache import Cache, Entry, key_of

log = logger(__name__)

Progress = Callable[[int, int], None]
"""Told how many pictures are done, of how many; once at the end where they come from the cache."""

KIND = "pictures"
FORMAT = 1
"""What is decoded in another way has another number."""
CHANNELS = 3
COPIES = 2
"""Of the pixels, on disk while they are decoded: the file they are decoded into, and that of the cache."""
NAMED = 3
"""How many files a line names."""
LONGEST_NAME = 60
"""Characters of a name that a line shows."""


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Pixels of many pictures in one tensor on disk: `(pictures.pixels, target)` is data for any feed."""

    pixels: Tensor
    """uint8 of (pictures, 3, size, size), a row for each file in its order; read from disk when it is looked at. The
    row of a broken file is black."""
    broken: Mapping[int, str]
    """Why the files of these rows gave no picture."""
    reused: bool
    """Whether they come from the cache."""
    took_s: float
    saved_s: float
    """What it took to decode them, where they come from the cache; else 0."""
    not_kept: str = ""
    """Why the next run has to decode them again; empty where it does not."""
    digests: tuple[str, ...] = field(default=(), repr=False)
    """The sha256 of each file: equal for copies of one picture; empty for a file that cannot be read."""

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def whole(self) -> np.ndarray[Any, Any]:
        """The rows that are pictures."""
        return np.setdiff1d(np.arange(len(self)), np.fromiter(self.broken, np.int64, len(self.broken)))

    @property
    def line(self) -> str:
        """The decoding in one line, for people."""
        side = self.pixels.shape[-1]
        size = show_bytes(self.pixels.numel())
        whole = f"{len(self) - len(self.broken):,} of {side} × {side} pixels ({size} on disk)"
        if self.reused:
            return f"{whole}, from the cache, which saved {show_seconds(self.saved_s)}"
        kept = f", not kept: {self.not_kept}" if self.not_kept else ""
        return f"{whole} in {show_seconds(self.took_s)}{kept}"


def decoded(
    files: Iterable[str | os.PathLike[str]],
    *,
    size: int = 224,
    fit: Fit = "stretch",
    cache: Cache | Literal[False] | None = None,
    progress: Progress | None = None,
) -> Pictures:
    """All JPEG and PNG files as squares of `size` pixels: from the cache where they are, else decoded and kept.

    `fit` says how a picture becomes a square: `stretch` takes all of it, `crop` the square in its middle. Files that
    are broken, empty, too large or no pictures stop nothing: see `broken`. Pixels are kept by what is in the files, not
    by their names, in `cache` (None: hotlap's own, False: none). A cache that cannot be used stops nothing. Raises
    DataError with all mistakes, and where no file is a picture.
    """
    began = time.perf_counter()
    paths = _checked(files, size, fit)
    pillow()
    digests, unread = _digests(paths)
    # Two that cannot be read for other reasons are not the same.
    known = [digest or why for digest, why in zip(digests, unread, strict=True)]
    held, key, why_not = _place(cache, known, size, fit)
    entry = _found(held, key)
    if entry is not None:
        if progress is not None:
            progress(len(paths), len(paths))
        return _from(entry, digests, began)
    with contextlib.ExitStack() as stack:
        folder, unkept = _scratch(stack, held, key)
        room, broken = _decoded(folder, paths, size, fit, progress)
        if len(broken) == len(paths):
            raise DataError(f"none of {len(paths):,} files is a picture: {broken_told(paths, broken)}")
        pixels = torch.from_numpy(np.memmap(room, np.uint8, mode="c")).reshape(-1, CHANNELS, size, size)
        took_s = time.perf_counter() - began
        made = Pictures(
            pixels=pixels,
            broken=broken,
            reused=False,
            took_s=took_s,
            saved_s=0.0,
            not_kept=why_not or unkept,
            digests=digests,
        )
        return _kept(made, held, key) if held is not None and not unkept else made


def broken_told(paths: Iterable[str | os.PathLike[str]], broken: Mapping[int, str]) -> str:
    """The first broken files with what is wrong with them, in one line; the others are counted."""
    names = list(paths)
    said = [f"{_short(Path(names[row]).name)} {why}" for row, why in list(broken.items())[:NAMED]]
    more = f" and {len(broken) - NAMED:,} more" if len(broken) > NAMED else ""
    return f"{'; '.join(said)}{more}"


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


# --- the cache -------------------------------------------------------------------------------------


def _digests(paths: list[str]) -> tuple[tuple[str, ...], list[str]]:
    """The sha256 of each file, and why others have none; by a thread for each core: hashing lets the others run."""
    with ThreadPoolExecutor(max(1, read_cpu().cores)) as threads:
        found = list(threads.map(_digest, paths))
    return tuple(digest for digest, _ in found), [why for _, why in found]


def _digest(path: str) -> tuple[str, str]:
    try:
        return hashlib.sha256(read(Path(path))).hexdigest(), ""
    except BrokenError as error:
        return "", str(error)


def _place(
    cache: Cache | Literal[False] | None, known: list[str], size: int, fit: Fit
) -> tuple[Cache | None, str, str]:
    """The cache, and the key of these pixels in it; without a cache, why there is none."""
    if cache is False:
        return None, "", "no cache was wanted"
    try:
        # Another decoder rounds otherwise.
        decoder = "pillow" if fast_decoder() is None else "simplejpeg"
        return cache or Cache(), key_of(KIND, FORMAT, decoder, size, fit, known), ""
    except StoreError as error:
        log.info("the pictures are not cached: %s", error)
        return None, "", str(error)


def _found(cache: Cache | None, key: str) -> Entry | None:
    if cache is None:
        return None
    try:
        return cache.get(KIND, key, on_disk=True)
    except StoreError as error:
        log.warning("the cached pictures are not used: %s", error)
        return None


def _from(entry: Entry, digests: tuple[str, ...], began: float) -> Pictures:
    values = entry.values
    return Pictures(
        pixels=entry.tensors["pixels"],
        broken=dict(zip(values["broken_rows"], values["broken_why"], strict=True)),
        reused=True,
        took_s=time.perf_counter() - began,
        saved_s=values["took_s"],
        digests=digests,
    )


def _kept(pictures: Pictures, cache: Cache, key: str) -> Pictures:
    """The same pictures as the cache has them, where it takes them."""
    values = {
        "broken_rows": list(pictures.broken),
        "broken_why": list(pictures.broken.values()),
        "took_s": pictures.took_s,
    }
    facts = {"pictures": len(pictures), "size": pictures.pixels.shape[-1], "took_s": pictures.took_s}
    try:
        cache.put(KIND, key, tensors={"pixels": pictures.pixels}, values=values, facts=facts)
        entry = cache.get(KIND, key, on_disk=True)
    except StoreError as error:
        log.warning("the pictures are not cached: %s", error)
        return replace(pictures, not_kept=str(error))
    # From the cache's own file: that which they were decoded into goes.
    return pictures if entry is None else replace(pictures, pixels=entry.tensors["pixels"])


# --- decoding --------------------------------------------------------------------------------------


def _scratch(stack: contextlib.ExitStack, cache: Cache | None, key: str) -> tuple[Path, str]:
    """A folder for the pixels while they are decoded, gone with `stack`; where it is not in the cache, why.

    The cache's disk has to hold them anyway.
    """
    why = ""
    if cache is not None:
        try:
            return stack.enter_context(cache.scratch(KIND, key)), ""
        except StoreError as error:
            log.warning("the pictures are not cached: %s", error)
            why = str(error)
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hotlap-pictures-"))), why


def _decoded(
    folder: Path, paths: list[str], size: int, fit: Fit, progress: Progress | None
) -> tuple[Path, dict[int, str]]:
    """A file with the pixels of all pictures, one behind the other, and why some of them are none."""
    room, needed = folder / "pixels", len(paths) * CHANNELS * size * size
    free = shutil.disk_usage(folder).free
    if COPIES * needed > free:
        told = f"{show_bytes(COPIES * needed)} of disk while they are decoded, and {folder.parent} has"
        raise StoreError(f"the pictures need {told} {show_bytes(free)}; name another place with HOTLAP_CACHE")
    with room.open("wb") as file:
        file.truncate(needed)
    one = functools.partial(decode_into, str(room), size, fit)
    found = parallel_map(one, list(enumerate(paths)), progress=progress)
    return room, {row: why for row, why in enumerate(found) if why is not None}


# --- what is given ---------------------------------------------------------------------------------


def _checked(files: Any, size: Any, fit: Any) -> list[str]:
    """The paths, read once; DataError with all that is wrong."""
    wrong: list[str] = []
    paths: list[str] = []
    if isinstance(files, (str, bytes, os.PathLike)) or not hasattr(files, "__iter__"):
        wrong.append(f"files is {kind_of(files)}; give a list of paths")
    else:
        given = list(files)
        bad = [at for at, path in enumerate(given) if not isinstance(path, (str, os.PathLike))]
        if bad:
            wrong.append(f"files[{bad[0]}] is {kind_of(given[bad[0]])}, the first of {len(bad):,}; give paths")
        elif not given:
            wrong.append("files is empty; give at least one")
        else:
            paths = [os.fspath(path) for path in given]
    if not is_whole(size) or size < 1:
        wrong.append(f"size={shown(size)} must be a whole number of at least 1")
    if fit not in get_args(Fit):
        wrong.append(f"fit={shown(fit)} must be one of {', '.join(get_args(Fit))}")
    if wrong:
        raise DataError(listed("the pictures have", "mistake", wrong))
    return paths
