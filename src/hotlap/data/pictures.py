"""Pictures decoded once, in parallel, into a file of pixels that the cache keeps.

This file imports torch only where it needs it: without torch the processes that decode start in a tenth of the time.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import io
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from hotlap.core.errors import (
    DataError,
    MachineError,
    StoreError,
    first_few,
    first_line,
    install,
    kind_of,
    listed,
    shown,
)
from hotlap.core.terminal import logger
from hotlap.core.units import MIB, show_bytes, show_seconds
from hotlap.core.warning_filters import filtered
from hotlap.data.parallel import parallel_map
from hotlap.machine.limits import read_cpu

if TYPE_CHECKING:
    from torch import Tensor

    from hotlap.store.cache import Cache, CacheEntry

Pixels = np.ndarray[Any, Any]
Fit = Literal["stretch", "crop"]
FITS: tuple[Fit, ...] = ("stretch", "crop")
"""How a picture becomes a square: the whole picture stretched, or its middle cropped."""
FORMATS = ("JPEG", "PNG")
MOST_BYTES = 256 * MIB
"""hotlap reads no larger file."""
MOST_PIXELS = 90_000_000
"""hotlap decodes no larger picture: each decoding process would need the memory for it."""
GAP = 2
"""The decoder shrinks a JPEG to at least so many times the wanted size; resizing does the rest more exactly."""
TURNED = 0x0112
"""The EXIF entry for the orientation of the camera."""


class BrokenError(ValueError):
    """A file that hotlap cannot use as a picture; the text continues a sentence that begins with its name."""


def decode_into(pixel_file: str, size: int, fit: Fit, item: tuple[int, str]) -> str | None:
    """Decode a file, given as (row, path), into that row of the pixel file; return why it failed, or None.

    The row of a broken file stays as it is.
    """
    row, path = item
    if not path:
        return "has no path"
    try:
        pixels = decode_square(read_file(Path(path)), size, fit)
    except BrokenError as error:
        return str(error)
    with Path(pixel_file).open("r+b") as file:
        file.seek(row * pixels.nbytes)
        file.write(pixels.data)
    return None


def read_file(path: Path) -> bytes:
    """The bytes of a file; BrokenError says why hotlap cannot read it."""
    try:
        found = path.stat()
        if stat.S_ISDIR(found.st_mode):
            raise BrokenError("is a folder")
        if not stat.S_ISREG(found.st_mode):
            raise BrokenError("is not a regular file")
        if found.st_size > MOST_BYTES:
            raise BrokenError(
                f"has {show_bytes(found.st_size)}, more than the {show_bytes(MOST_BYTES)} that hotlap reads"
            )
        content = path.read_bytes()
    except BrokenError:
        raise
    except FileNotFoundError:
        raise BrokenError("does not exist") from None
    except (OSError, ValueError) as error:  # such as a name that holds a zero byte
        raise BrokenError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not content:
        raise BrokenError("is empty")
    return content


def decode_square(content: bytes, size: int, fit: Fit = "stretch") -> Pixels:
    """An RGB picture as uint8 of (3, size, size), rotated upright; BrokenError says why it cannot be decoded."""
    library = pillow()
    with filtered():  # for damaged metadata, and for many pixels, which `_opened` counts
        try:
            image, turn = _opened(library, content, size)
            plain = _in_colours(library, image)
            made = _cropped(plain, fit).resize((size, size), library.Image.Resampling.BILINEAR)
            if turn is not None:  # the middle is the same before and after rotation
                made = made.transpose(turn)
        except BrokenError:
            raise
        except library.Image.DecompressionBombError:
            raise BrokenError(f"has more than {MOST_PIXELS:,} pixels") from None
        except library.UnidentifiedImageError:
            raise BrokenError("is neither JPEG nor PNG") from None
        except Exception as error:  # a decoder may raise anything for a damaged file
            raise BrokenError(f"cannot be decoded: {first_line(error)[:100]}") from None
    return np.ascontiguousarray(np.asarray(made).transpose(2, 0, 1))


def _opened(library: Any, content: bytes, size: int) -> tuple[Any, Any]:
    """The decoded picture and its rotation; a JPEG is shrunk as far as `GAP` allows."""
    image = library.Image.open(io.BytesIO(content), formats=FORMATS)
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise BrokenError(f"has {width:,} × {height:,} pixels, more than the {MOST_PIXELS:,} that hotlap decodes")
    wanted = GAP * size
    if image.format == "JPEG" and image.mode in ("RGB", "L"):
        decoded = _fast(content, wanted)
        if decoded is not None:
            return library.Image.fromarray(decoded), _turn(library, image)
        image.draft(image.mode, (wanted, wanted))
    image.load()
    return image, _turn(library, image)


def _turn(library: Any, image: Any) -> Any:
    """The rotation that turns the picture upright; None if EXIF names none."""
    to = library.Image.Transpose
    turns = {
        2: to.FLIP_LEFT_RIGHT,
        3: to.ROTATE_180,
        4: to.FLIP_TOP_BOTTOM,
        5: to.TRANSPOSE,
        6: to.ROTATE_270,
        7: to.TRANSVERSE,
        8: to.ROTATE_90,
    }
    try:
        return turns.get(image.getexif().get(TURNED))
    except Exception:  # damaged metadata; the picture itself may be fine
        return None


def _fast(content: bytes, least: int) -> Pixels | None:
    """A JPEG from the fast decoder; None if there is no fast decoder or it refuses the file."""
    decoder = fast_decoder()
    if decoder is None:
        return None
    try:
        found: Pixels = decoder.decode_jpeg(content, colorspace="RGB", min_height=least, min_width=least)
    except ValueError:  # it refuses files that Pillow can read
        return None
    return found


def _in_colours(library: Any, image: Any) -> Any:
    """The picture in RGB: 16-bit grey becomes 8-bit, transparency becomes white."""
    if image.mode.startswith("I"):
        image = library.Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = library.Image.new("RGBA", image.size, "white")
        image = library.Image.alpha_composite(white, image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _cropped(image: Any, fit: Fit) -> Any:
    width, height = image.size
    if fit == "stretch" or width == height:
        return image
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return image.crop((left, top, left + side, top + side))


@functools.cache
def pillow() -> Any:
    """Pillow; MachineError names the extra that installs it."""
    try:
        found = importlib.import_module("PIL")
        importlib.import_module("PIL.Image")
    except ImportError:
        raise MachineError(f"pictures need Pillow: {install('[images]')}") from None
    return found


@functools.cache
def fast_decoder() -> Any:
    """simplejpeg if it is installed, else None."""
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None


log = logger(__name__)

Progress = Callable[[int, int], None]
"""A function of pictures done and pictures in all; for cached pictures hotlap calls it once, at the end."""

KIND = "pictures"
FORMAT = 1
"""Version of the decoding; a change makes old cache entries miss."""
CHANNELS = 3
COPIES = 2
"""Copies of the pixels on disk while hotlap decodes: its own file and the cache's."""
LONGEST_NAME = 60
"""Characters of a name that a message shows."""


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Pixels of many pictures in one tensor on disk: `(pictures.pixels, target)` is data for any feed."""

    pixels: Tensor
    """uint8 of (pictures, 3, size, size), a row for each file in order, read from disk on access. The row of a broken
    file is black."""
    broken: Mapping[int, str]
    """Row of each broken file, and why it is broken."""
    reused: bool
    """Whether the pixels come from the cache."""
    took_s: float
    saved_s: float
    """Seconds that the cache saved; 0 if hotlap decoded the pictures now."""
    not_kept: str = ""
    """Why the cache does not keep the pixels; empty if it does."""
    digests: tuple[str, ...] = field(default=(), repr=False)
    """The sha256 of each file; empty for a file that cannot be read."""

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def whole(self) -> np.ndarray[Any, Any]:
        """The rows of files that are not broken."""
        return np.setdiff1d(np.arange(len(self)), np.fromiter(self.broken, np.int64, len(self.broken)))

    @property
    def line(self) -> str:
        """A summary in one line."""
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
    """All JPEG and PNG files as squares of `size` pixels, from the cache or decoded now and then kept there.

    `fit` says how a picture becomes a square: `stretch` uses the whole picture, `crop` its middle. Broken, empty and
    too large files are listed in `broken`; decoding goes on. The key is the content of the files, not their names.
    `cache` is None for hotlap's own, or False for none; without a usable cache decoding goes on. Raises DataError with
    all mistakes, and if no file is a picture.
    """
    import torch

    began = time.perf_counter()
    paths = _checked(files, size, fit)
    pillow()
    digests, unread = _digests(paths)
    # Two unreadable files are the same only if the reason is.
    known = [digest or why for digest, why in zip(digests, unread, strict=True)]
    store, key, why_not = _cache_and_key(cache, known, size, fit)
    entry = None if store is None else store.get_or_warn(KIND, key, on_disk=True)
    if entry is not None:
        if progress is not None:
            progress(len(paths), len(paths))
        return _from_entry(entry, digests, began)
    with contextlib.ExitStack() as stack:
        folder, unkept = _scratch(stack, store, key)
        pixel_file, broken = _decoded(folder, paths, size, fit, progress)
        if len(broken) == len(paths):
            raise DataError(f"none of {len(paths):,} files is a picture: {list_broken(paths, broken)}")
        pixels = torch.from_numpy(np.memmap(pixel_file, np.uint8, mode="c")).reshape(-1, CHANNELS, size, size)
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
        return _keep(made, store, key) if store is not None and not unkept else made


def list_broken(paths: Iterable[str | os.PathLike[str]], broken: Mapping[int, str]) -> str:
    """The first broken files with their problems, and the number of the others, in one line."""
    names = list(paths)
    return first_few([f"{_short(Path(names[row]).name)} {why}" for row, why in broken.items()], between="; ")


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


# --- the cache -------------------------------------------------------------------------------------


def _digests(paths: list[str]) -> tuple[tuple[str, ...], list[str]]:
    """The sha256 of each file, or why it has none; one thread per core, since hashing releases the GIL."""
    with ThreadPoolExecutor(max(1, read_cpu().cores)) as threads:
        found = list(threads.map(_digest, paths))
    return tuple(digest for digest, _ in found), [why for _, why in found]


def _digest(path: str) -> tuple[str, str]:
    try:
        return hashlib.sha256(read_file(Path(path))).hexdigest(), ""
    except BrokenError as error:
        return "", str(error)


def _cache_and_key(
    cache: Cache | Literal[False] | None, known: list[str], size: int, fit: Fit
) -> tuple[Cache | None, str, str]:
    """The cache and the key of these pixels; or why there is no cache."""
    if cache is False:
        return None, "", "cache=False"
    from hotlap.store.cache import Cache, key_of  # imports torch

    try:
        # Decoders round differently.
        decoder = "pillow" if fast_decoder() is None else "simplejpeg"
        return cache or Cache(), key_of(KIND, FORMAT, decoder, size, fit, known), ""
    except StoreError as error:
        log.info("the cache does not keep the pictures: %s", error)
        return None, "", str(error)


def _from_entry(entry: CacheEntry, digests: tuple[str, ...], began: float) -> Pictures:
    values = entry.values
    return Pictures(
        pixels=entry.tensors["pixels"],
        broken=dict(zip(values["broken_rows"], values["broken_why"], strict=True)),
        reused=True,
        took_s=time.perf_counter() - began,
        saved_s=values["took_s"],
        digests=digests,
    )


def _keep(pictures: Pictures, cache: Cache, key: str) -> Pictures:
    """Put the pictures into the cache, and return them from there."""
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
        log.warning("the cache does not keep the pictures: %s", error)
        return replace(pictures, not_kept=str(error))
    # From the cache's own file: hotlap removes the one that it decoded into.
    return pictures if entry is None else replace(pictures, pixels=entry.tensors["pixels"])


# --- decoding --------------------------------------------------------------------------------------


def _scratch(stack: contextlib.ExitStack, cache: Cache | None, key: str) -> tuple[Path, str]:
    """A folder for the pixels while hotlap decodes, removed with `stack`; and why it is not in the cache, if so.

    The disk of the cache has to hold the pixels anyway.
    """
    why = ""
    if cache is not None:
        try:
            return stack.enter_context(cache.scratch(KIND, key)), ""
        except StoreError as error:
            log.warning("the cache does not keep the pictures: %s", error)
            why = str(error)
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hotlap-pictures-"))), why


def _decoded(
    folder: Path, paths: list[str], size: int, fit: Fit, progress: Progress | None
) -> tuple[Path, dict[int, str]]:
    """A file with the pixels of all pictures in order, and the rows of broken files with their problems."""
    pixel_file, needed = folder / "pixels", len(paths) * CHANNELS * size * size
    free = shutil.disk_usage(folder).free
    if COPIES * needed > free:
        raise StoreError(
            f"decoding needs {show_bytes(COPIES * needed)} of disk, and {folder.parent} has {show_bytes(free)}; "
            "name another place with HOTLAP_CACHE"
        )
    with pixel_file.open("wb") as file:
        file.truncate(needed)
    one = functools.partial(decode_into, str(pixel_file), size, fit)
    found = parallel_map(one, list(enumerate(paths)), progress=progress)
    return pixel_file, {row: why for row, why in enumerate(found) if why is not None}


# --- arguments -------------------------------------------------------------------------------------


def _checked(files: Any, size: Any, fit: Any) -> list[str]:
    """The paths; DataError lists all mistakes."""
    from hotlap.core.job_checks import is_whole  # imports torch

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
