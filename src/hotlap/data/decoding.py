"""One file of a picture decoded to a square of pixels, or the words why it cannot be.

Nothing here imports torch: processes that decode start in a tenth of the time without it.
"""

from __future__ import annotations

import functools
import importlib
import io
import stat
import warnings
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hotlap.core.errors import MachineError
from hotlap.core.units import MIB, show_bytes

Pixels = np.ndarray[Any, Any]
Fit = Literal["stretch", "crop"]
FITS: tuple[Fit, ...] = ("stretch", "crop")
"""How a picture becomes a square: squeezed as a whole, or the square in its middle."""
FORMATS = ("JPEG", "PNG")
MOST_BYTES = 256 * MIB
"""A larger file is no picture of a training."""
MOST_PIXELS = 90_000_000
"""A picture of more would fill the memory of every process that decodes one."""
GAP = 2
"""A JPEG is decoded to no less than so many times the size wanted: the rest is done with more care, by resizing."""
TURNED = 0x0112
"""The entry of EXIF that says how a camera was held."""


class BrokenError(ValueError):
    """A file that is no picture to be used, in a few words."""


def decode_into(room: str, size: int, fit: Fit, item: tuple[int, str]) -> str | None:
    """Decode a file (its row, and its path) into that row of a file of pixels; why it cannot be, or None where it is.

    The row of one that cannot be is left as it is.
    """
    row, path = item
    if not path:
        return "has no path"
    try:
        pixels = squared(read(Path(path)), size, fit)
    except BrokenError as error:
        return str(error)
    with Path(room).open("r+b") as file:
        file.seek(row * pixels.nbytes)
        file.write(pixels.data)
    return None


def read(path: Path) -> bytes:
    """The bytes of a file; BrokenError where there are none to be had."""
    try:
        found = path.stat()
        if stat.S_ISDIR(found.st_mode):
            raise BrokenError("is a folder")
        if not stat.S_ISREG(found.st_mode):
            raise BrokenError("is not a regular file")
        if found.st_size > MOST_BYTES:
            raise BrokenError(f"has {show_bytes(found.st_size)}, and {show_bytes(MOST_BYTES)} at most are read")
        content = path.read_bytes()
    except BrokenError:
        raise
    except FileNotFoundError:
        raise BrokenError("does not exist") from None
    except (OSError, ValueError) as error:  # a name with a zero in it, for one
        raise BrokenError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not content:
        raise BrokenError("is empty")
    return content


def squared(content: bytes, size: int, fit: Fit = "stretch") -> Pixels:
    """A picture in RGB as uint8 of (3, size, size), turned as its camera was held; BrokenError where it is none."""
    library = pillow()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of metadata that is damaged, and of many pixels, which are counted below
        try:
            image, turn = _opened(library, content, size)
            plain = _in_colours(library, image)
            made = _cut(plain, fit).resize((size, size), library.Image.Resampling.BILINEAR)
            if turn is not None:  # a square is cut from its middle the same before and after
                made = made.transpose(turn)
        except BrokenError:
            raise
        except library.Image.DecompressionBombError:
            raise BrokenError(f"has more than {MOST_PIXELS:,} pixels") from None
        except library.UnidentifiedImageError:
            raise BrokenError("is no JPEG and no PNG") from None
        except Exception as error:  # a damaged file makes a decoder raise whatever comes first
            raise BrokenError(f"cannot be decoded: {_first_line(error)}") from None
    return np.ascontiguousarray(np.asarray(made).transpose(2, 0, 1))


def _opened(library: Any, content: bytes, size: int) -> tuple[Any, Any]:
    """The picture, decoded, and how it is to be turned; a JPEG no larger than there is use for."""
    image = library.Image.open(io.BytesIO(content), formats=FORMATS)
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise BrokenError(f"has {width:,} × {height:,} pixels, and {MOST_PIXELS:,} at most are decoded")
    wanted = GAP * size
    if image.format == "JPEG" and image.mode in ("RGB", "L"):
        decoded = _fast(content, wanted)
        if decoded is not None:
            return library.Image.fromarray(decoded), _turn(library, image)
        image.draft(image.mode, (wanted, wanted))
    image.load()
    return image, _turn(library, image)


def _turn(library: Any, image: Any) -> Any:
    """What undoes how the camera was held; None where there is nothing to undo, or nothing that can be read."""
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
    except Exception:  # of metadata that is damaged: the picture is not
        return None


def _fast(content: bytes, least: int) -> Pixels | None:
    """A JPEG by the fast decoder; None where there is none, or it will not have it."""
    decoder = fast_decoder()
    if decoder is None:
        return None
    try:
        found: Pixels = decoder.decode_jpeg(content, colorspace="RGB", min_height=least, min_width=least)
    except ValueError:  # it is stricter than need be: Pillow decides what is broken
        return None
    return found


def _in_colours(library: Any, image: Any) -> Any:
    """The picture in RGB: shades of sixteen bits brought to eight, what is transparent on white."""
    if image.mode.startswith("I"):
        image = library.Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = library.Image.new("RGBA", image.size, "white")
        image = library.Image.alpha_composite(white, image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _cut(image: Any, fit: Fit) -> Any:
    width, height = image.size
    if fit == "stretch" or width == height:
        return image
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return image.crop((left, top, left + side, top + side))


@functools.cache
def pillow() -> Any:
    """The library that decodes; MachineError names the extra where it is missing."""
    try:
        found = importlib.import_module("PIL")
        importlib.import_module("PIL.Image")
    except ImportError:
        raise MachineError("pictures need Pillow: pip install hotlap[images]") from None
    return found


@functools.cache
def fast_decoder() -> Any:
    """simplejpeg, where it is installed; else None."""
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:100]
