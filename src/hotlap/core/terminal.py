"""The one way in which hotlap shows something: a terminal is never driven by it, and no training ends by it.

Names of columns, files and metrics, cells, options, configs and what libraries say may be a stranger's. They are made
harmless here, where they are shown, and nowhere else.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import sys
import textwrap
import unicodedata
from collections.abc import Callable, Iterable
from typing import TextIO

Say = Callable[[str], None]
"""Shows the user one line of progress."""

_LABEL = re.compile(r"\s*(\S{1,12} {2,})?")
"""What a line may begin with, and later lines leave free."""
_FORGED_LINE = re.compile(r"\n(?!  )")


class _Escapes(dict[int, str]):
    """For `str.translate`: what stands for a character, found out once for each."""

    def __missing__(self, code: int) -> str:
        sign = chr(code)
        if unicodedata.category(sign) == "Zs":
            sign = " "
        self[code] = sign = sign if sign.isprintable() else sign.encode("unicode_escape").decode()
        return sign


_escapes = _Escapes()


def clean(text: str) -> str:
    """`text` as one line that a terminal shows and does not obey: what cannot be printed is as Python escapes it."""
    return text if text.isprintable() else text.translate(_escapes)


def clean_lines(text: str) -> str:
    """The same, where lines that are indented may follow the first: no other can be forged."""
    if text.isprintable():
        return text
    return "\n".join(map(clean, _FORGED_LINE.sub(r"\\n", text).split("\n")))


def say(*lines: str, stream: TextIO | None = None) -> None:
    """Show lines on stderr, or another stream. What cannot be written is lost, and nothing is raised."""
    stream = sys.stderr if stream is None else stream
    if stream is not None:  # without a console, as under pythonw, there is none
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # the last inside of another write
            write(stream, "".join(f"{line}\n" for line in fitted(lines, stream)))


def fitted(lines: Iterable[str], stream: TextIO) -> list[str]:
    """Clean lines, broken between words where a terminal would break them within; JSON stays in one line."""
    width = columns(stream)
    cleaned = [clean(line) for line in lines]
    if width is None:
        return cleaned
    return [part for line in cleaned for part in ([line] if line.startswith("{") else wrapped(line, width))]


def wrapped(line: str, width: int) -> list[str]:
    """A line in lines of at most `width` columns, but for longer words; later ones begin below the first one's text."""
    if len(line) <= width:
        return [line]
    label = _LABEL.match(line)
    indent = len(label[0]) if label and label[0] and len(label[0]) <= width // 2 else 4
    return textwrap.wrap(
        line, max(width, indent + 1), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


def columns(stream: TextIO | None) -> int | None:
    """How wide a terminal is; None for any other stream."""
    if stream is None or not is_terminal(stream):
        return None
    with contextlib.suppress(OSError, ValueError):
        return int(os.environ.get("COLUMNS", "")) or None
    with contextlib.suppress(AttributeError, OSError, ValueError):
        return os.get_terminal_size(stream.fileno()).columns or None
    return None


def silent(line: str) -> None:
    """Show nothing: a `Say` for callers who want no progress."""


def write(stream: TextIO, text: str) -> None:
    """Write to a stream at once; OSError or ValueError where that cannot be done."""
    # What a full disk or a closed pipe refuses would stay in the buffer, and end the process with exit code 120.
    unbuffered = _unbuffered(stream)
    if unbuffered is None:
        stream.write(text)
        stream.flush()
        return
    stream.flush()
    left = text.encode(stream.encoding, "backslashreplace")
    while left:
        written = unbuffered.write(left)
        if written is None:
            raise BlockingIOError
        left = left[written:]


def is_terminal(stream: TextIO) -> bool:
    """Whether a stream is a terminal; a closed stream, or one that does not say, is none."""
    try:
        return stream.isatty()
    except (AttributeError, OSError, ValueError):
        return False


def logger(name: str) -> logging.Logger:
    """The logger of a module; control characters in what it logs are escaped."""
    found = logging.getLogger(name)
    found.addFilter(_clean_record)
    return found


def _clean_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = clean(record.getMessage()), None
    return True


def _unbuffered(stream: TextIO) -> io.RawIOBase | None:
    """The file below a plain stream of Python's; None for any other, which may do more with what it is given."""
    if type(stream) is not io.TextIOWrapper:
        return None
    below = stream.buffer.raw if isinstance(stream.buffer, io.BufferedWriter) else stream.buffer
    return below if isinstance(below, io.FileIO) else None
