"""Pictures of PIL followed from their files, so that hotlap can remember what is made of them.

hotlap leaves to PIL what it does not know in all respects: other formats than JPEG and PNG, palettes with transparency,
animations, drafts, file objects of other kinds.
"""

from __future__ import annotations

import contextlib
import functools
import io
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from PIL import Image, ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile

from hotlap.data.picture_memory import LEAST_PIXELS, MODES, MOST_FILE_BYTES, Known, PictureMemory, key_of

FORMATS: Final = (JpegImageFile, PngImageFile)
CONVERTED_TO: Final = ("L", "RGB", "YCbCr", "RGBA")
FILE: Final = "_hotlap_file"
"""Attribute of a file's picture that was not decoded: its `File`."""

Picture = Image.Image
Own = Callable[..., Any]
"""A method of PIL."""


def patches(memory: PictureMemory) -> list[tuple[Any, str, Callable[[Own], Own]]]:
    """Owners, names and makers of the patches of PIL that follow pictures into a memory."""
    follower = _Follower(memory)
    return [
        (Image.Image, "convert", functools.partial(follower.followed, _convert_args)),
        (Image.Image, "resize", functools.partial(follower.followed, _resize_args)),
        (ImageFile.ImageFile, "load", follower.loaded),
    ]


class _Inside(threading.local):
    """Inside, this thread makes pictures for hotlap, which are not followed."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


_inside = _Inside()


# --- where a picture comes from ------------------------------------------------------------


@dataclass
class File:
    """The bytes of a picture's file."""

    memory: PictureMemory
    data: bytes
    read_s: float
    """Seconds that reading and hashing took."""
    end: int = 0
    """Where decoding left the script's own file object."""
    made_s: float = 0.0
    """Seconds that PIL took for the picture so far."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """How a picture is made: from a file, or by a call of PIL from another one."""

    file: File
    key: bytes
    mode: str
    size: tuple[int, int]
    before: Origin | None = None
    own: Own | None = None
    args: tuple[Any, ...] = ()

    def way(self) -> Iterator[Origin]:
        """The origins of this picture, of the one before it, and so on to the file."""
        one: Origin | None = self
        while one is not None:
            yield one
            one = one.before

    @property
    def known(self) -> Known | None:
        """The picture in memory, if its pixels are there."""
        known = self.file.memory.find(self.key)
        return known if known is not None and known.at is not None else None

    def made(self, *, anew: bool = False) -> Picture:
        """The picture, made by PIL from the nearest one in memory, or (`anew`) from its file."""
        known = None if anew else self.known
        with _inside:
            if known is not None:
                return Image.frombytes(known.mode, known.size, self.file.memory.pixels(known))
            if self.before is None or self.own is None:
                opened: Picture = Image.open(io.BytesIO(self.file.data))
                opened.load()
                return opened
            made: Picture = self.own(self.before.made(anew=anew), *self.args)
            return made

    def remember(self, picture: Picture) -> None:
        """Keep a picture that was just made."""
        memory, (_, *way) = self.file.memory, self.way()
        if not memory.is_on or self.mode not in MODES or self.known is not None:
            return
        began = time.perf_counter()
        one: Origin = self
        if way and memory.find(way[-1].key) is not None:
            # The file was seen before, with other calls. A second picture of it is kept too. If there are more, their
            # sizes may be random: then the picture before the last call is kept.
            many = key_of(way[-1].key, b"many")
            if memory.find(many) is None:
                memory.add(many, self.mode, self.size, 0, None)
            elif any(before.known for before in way) or way[0].mode not in MODES:
                return
            else:
                one, picture, way = way[0], way[0].made(), way[1:]
        with _inside:
            pixels = picture.tobytes()
        if memory.add(one.key, one.mode, one.size, self.file.end, pixels):
            for before in way:
                if before.mode in MODES and memory.find(before.key) is None:
                    memory.add(before.key, before.mode, before.size, self.file.end, None)
        memory.count_remembered(time.perf_counter() - began + self.file.read_s, self.file.made_s)

    def recall(self) -> Picture:
        """The picture from memory; the first ones are also made anew."""
        memory, began = self.file.memory, time.perf_counter()
        picture = self.made()
        recall_s = time.perf_counter() - began + self.file.read_s
        return memory.recalled(picture, recall_s, functools.partial(self.made, anew=True), _are_same)


def _are_same(one: Picture, other: Picture) -> bool:
    return (one.mode, one.size, one.tobytes()) == (other.mode, other.size, other.tobytes())


class FollowedPicture(Image.Image):
    """A picture whose pixels are recalled, made or remembered at their first use. It then is one of PIL's own."""

    _origin: Origin
    _fresh: Picture | None

    @classmethod
    def of(cls, origin: Origin, info: dict[Any, Any], fresh: Picture | None = None) -> FollowedPicture:
        """A picture of this origin; `fresh` is the picture itself where PIL has just made it."""
        picture: Any = Image.Image()
        own = vars(picture)
        own.pop("_im", None)  # which PIL before version 11 calls `im`
        own.pop("im", None)
        own.update(_mode=origin.mode, _size=origin.size, info=info, _origin=origin, _fresh=fresh)
        picture.__class__ = cls
        followed: FollowedPicture = picture
        return followed

    def source(self) -> Picture:
        """The picture for another call of PIL; it is not remembered."""
        if self._fresh is None:
            self._fresh = self._origin.made()
        return self._fresh

    def settle(self) -> None:
        """Become a picture with pixels."""
        origin, fresh = self._origin, self._fresh
        if fresh is None and origin.known is not None:
            fresh = origin.recall()
        else:
            fresh = fresh or origin.made()
            with contextlib.suppress(Exception):  # then it is made again the next time
                origin.remember(fresh)
        self._become(fresh.im)

    def _become(self, pixels: Any) -> None:
        del self._origin, self._fresh
        self.__class__ = Image.Image  # type: ignore[assignment]
        self.im = pixels

    def _settled(self) -> Any:
        self.settle()
        return self.im

    im = _im = property(_settled, _become)

    def __eq__(self, other: object) -> bool:
        self.settle()
        return self == other

    __hash__ = None  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.settle()
        return self.__reduce_ex__(protocol)


# The script may ask for the name of the class.
FollowedPicture.__name__, FollowedPicture.__qualname__ = Image.Image.__name__, Image.Image.__qualname__
FollowedPicture.__module__ = Image.Image.__module__


# --- following calls of PIL ----------------------------------------------------------------


class _Follower:
    def __init__(self, memory: PictureMemory) -> None:
        self._memory = memory

    def followed(self, plain_args: Callable[[Any, Any], tuple[Any, ...] | None], own: Own) -> Own:
        """Replaces `convert` or `resize`."""

        def called(picture: Any, *args: Any, **kwargs: Any) -> Any:
            plain = None
            is_followed = type(picture) is FollowedPicture
            if (is_followed or type(picture) in FORMATS) and self._follows(picture):
                plain = plain_args(args, kwargs)
            origin = None if plain is None else picture._origin if is_followed else self._origin_of(picture)
            if origin is None or plain is None:
                return own(picture, *args, **kwargs)
            return _follow(picture, origin, own, plain)

        return called

    def loaded(self, own: Own) -> Own:
        """Replaces `load` of a file's picture."""

        def load(picture: Any) -> Any:
            if FILE in vars(picture) and _pixels_of(picture) is None:
                return _load_late(picture, own)
            origin = self._origin_of(picture) if type(picture) is JpegImageFile and self._follows(picture) else None
            if origin is None:
                return own(picture)
            known = origin.known
            if known is not None:
                made = origin.recall()
                _skip_decoding(picture, origin.file, known.end)
                picture.im = made.im
                return Image.Image.load(picture)
            opened, began = picture.fp, time.perf_counter()
            pixels = own(picture)
            origin.file.made_s += time.perf_counter() - began
            origin.file.end = 0 if opened.closed else opened.tell()
            with contextlib.suppress(Exception):  # then it is decoded again the next time
                origin.remember(picture)
            return pixels

        return load

    def _follows(self, picture: Any) -> bool:
        return not _inside.depth and self._memory.is_on and "transparency" not in picture.info

    def _origin_of(self, picture: Any) -> Origin | None:
        """The origin of a file's picture that has no pixels yet; None where hotlap leaves it to PIL."""
        if not _is_plain(picture):
            return None
        began, opened = time.perf_counter(), picture.fp
        try:
            at = opened.tell()
            opened.seek(0)
            data = opened.read(MOST_FILE_BYTES + 1)
            opened.seek(at)
        except (OSError, ValueError):
            return None
        if len(data) > MOST_FILE_BYTES:
            return None
        key = key_of(data, repr((type(picture).__name__, picture.mode, ImageFile.LOAD_TRUNCATED_IMAGES)).encode())
        file = File(self._memory, data, time.perf_counter() - began)
        return Origin(file=file, key=key, mode=picture.mode, size=picture.size)


def _is_plain(picture: Any) -> bool:
    """Whether a file's picture is as PIL has opened it, and of a kind that hotlap knows."""
    return (
        _pixels_of(picture) is None
        and len(picture.tile) == 1
        and not picture.decoderconfig
        and type(picture.fp) in (io.BytesIO, io.BufferedReader)
        and picture.size[0] * picture.size[1] >= LEAST_PIXELS
        and not getattr(picture, "is_animated", False)
    )


def _pixels_of(picture: Picture) -> Any:
    own = vars(picture)
    return own.get("_im", own.get("im"))


def _convert_args(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """The arguments of `convert`, if hotlap follows such calls."""
    if kwargs.keys() == {"mode"} and not args:
        args, kwargs = (kwargs["mode"],), {}
    return args if not kwargs and len(args) == 1 and args[0] in CONVERTED_TO else None


def _resize_args(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """The arguments of `resize`, if hotlap follows such calls."""
    given = dict(zip(("size", "resample"), args, strict=False)) | kwargs
    if len(args) > 2 or "size" not in given or not given.keys() <= {"size", "resample", "reducing_gap"}:
        return None
    size, resample, gap = given["size"], given.get("resample"), given.get("reducing_gap")
    if type(size) not in (tuple, list) or not all(type(side) is int for side in size):
        return None
    if not (resample is None or isinstance(resample, int)) or not (gap is None or type(gap) is float):
        return None
    return (tuple(size), resample if resample is None else int(resample), None, gap)


def _follow(picture: Any, origin: Origin, own: Own, args: tuple[Any, ...]) -> Any:
    """What a call of PIL makes of a picture. Nothing is computed if it was made before."""
    is_file, key = type(picture) is not FollowedPicture, key_of(origin.key, repr(args).encode())
    known = origin.file.memory.find(key)
    if known is not None:
        after = Origin(file=origin.file, key=key, mode=known.mode, size=known.size, before=origin, own=own, args=args)
        if is_file:
            _skip_decoding(picture, origin.file, known.end)
        return FollowedPicture.of(after, picture.info.copy())
    info, opened, began = dict(picture.info), picture.fp if is_file else None, time.perf_counter()
    with _inside:
        made = own(picture if is_file else picture.source(), *args)
    origin.file.made_s += time.perf_counter() - began
    if opened is not None:
        origin.file.end = 0 if opened.closed else opened.tell()
    else:
        made.info = picture.info.copy()  # what comes from memory has none
    is_plain = type(made) is Image.Image and made.mode in MODES and made.palette is None
    if not is_plain or made.info != info or picture.info != info:
        return made
    after = Origin(file=origin.file, key=key, mode=made.mode, size=made.size, before=origin, own=own, args=args)
    return FollowedPicture.of(after, made.info, made)


def _skip_decoding(picture: Any, file: File, end: int) -> None:
    """Leave a file's picture as decoding does, but without pixels."""
    if picture._exclusive_fp and picture._close_exclusive_fp_after_loading:
        picture.fp.close()
    else:
        picture.fp.seek(end)
    if getattr(picture, "png", None) is not None:
        picture.png.close()
        picture.png = None
    picture.fp, picture.tile, picture.readonly = None, [], 0
    vars(picture)[FILE] = file


def _load_late(picture: Any, own: Own) -> Any:
    """Decode a file's picture whose decoding was skipped, since the script uses its own pixels after all."""
    with _inside, Image.open(io.BytesIO(vars(picture)[FILE].data)) as again:
        own(again)
        picture.im = again.im
    return Image.Image.load(picture)
