"""CSV files read exactly: column names, and cells as text. Messages name the line.

pandas and pyarrow read faster and lose what this file promises: space at the beginning of a cell, quotes behind such
space, leading zeros, and the line of a quote that is never closed, of a broken row or of a wrong byte.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, repeat
from pathlib import Path
from typing import Any

from hotlap.core.errors import DataError, StoreError, first_few, shown
from hotlap.core.units import MIB, show_bytes
from hotlap.machine.limits import read_memory
from hotlap.recipes.kinds import Cells, are_numbers
from hotlap.recipes.picture_files import SUFFIXES as PICTURES
from hotlap.store.files import read_bytes

SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
_DELIMITERS = ",;\t|"
_SAMPLE = 64 * 1024
"""Characters that show the delimiter."""
_BLOCK = 256 * 1024
"""Least bytes that become cells at a time."""
_ROWS = 10_000
"""Rows that csv reads at a time."""
MEMORY_A_BYTE = 4
"""Approximate bytes of memory that reading takes for each byte of a file."""
MOST_RATIO, SMALL_BYTES = 100, 100 * MIB
"""hotlap refuses a gzip file that unpacks to more than this many times its size, unless it is small."""
_LONGEST_FIELD = 2**31 - 1
_NO_TEXT = {
    b"PK\x03\x04": "a zip archive or an Excel file",
    b"PAR1": "a Parquet file, which is named .parquet",
    b"%PDF": "a PDF",
    b"\xff\xd8\xff": "a JPEG picture",
    b"\x89PNG": "a PNG picture",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_LONGEST_NAME = 60
"""Characters of a name that a message shows."""
_LISTED = 4
"""Names that a message shows before it counts the rest."""


class _OddError(ValueError):
    """The fast way of reading does not suit this file."""


class TextFile:
    """A CSV file. Raises DataError in one line, with file, line and value, where it is broken."""

    def __init__(self, file: Path, header: bool | None) -> None:
        self.file, self._header = file, header
        content = _content(file)
        self._delimiter = "\t" if ".tsv" in file.name.lower() else _delimiter(content)
        try:
            columns = self._columns(content)
        except (_OddError, UnicodeDecodeError, csv.Error):
            columns = self._in_rows(content)
        if not columns:
            raise DataError(f"{file} is empty; give it a header and rows")
        first = [column.first.strip() for column in columns]
        self._name(first, lambda place: columns[place])
        if self.has_names:
            columns = [column.without_first() for column in columns]
        self._cells = dict(zip(self.names, columns, strict=True))

    def __len__(self) -> int:
        return len(next(iter(self._cells.values())))

    def cells(self, name: str) -> Cells:
        """The cells of a column."""
        return self._cells[name]

    def _columns(self, content: bytes) -> list[Cells]:
        """All columns, header first; only a block of rows is in memory as rows at any time."""
        parts: list[list[str]] = []
        count = 0
        for columns in self._quoted(content) if b'"' in content else self._plain(content):
            parts = parts or [[] for _ in columns]
            if len(columns) != len(parts):
                raise _OddError
            for those, column in zip(parts, columns, strict=True):
                those.append(Cells.END.join(column))
            count += len(columns[0])
        return [Cells(those, count) for those in parts]

    def _plain(self, content: bytes) -> Iterator[list[list[str]]]:
        """The columns of a file without quotes, block by block: every delimiter separates two cells."""
        for block in _blocks(content):
            text = block.decode()
            if "\r" in text:
                text = text.replace("\r\n", "\n").replace("\r", "\n")
            lines = list(filter(None, text.split("\n")))
            if not lines:
                continue
            widths = set(map(str.count, lines, repeat(self._delimiter)))
            if len(widths) > 1:
                raise _OddError
            cells = self._delimiter.join(lines).split(self._delimiter)
            width = widths.pop() + 1
            yield [cells[place::width] for place in range(width)]

    def _quoted(self, content: bytes) -> Iterator[list[Sequence[str]]]:
        """The same for any file, read by csv."""
        readers = [self._reader(_lines_in(content))]
        if any(f"{before} ".encode() in content for before in (self._delimiter, "\n", "\r")) or content[:1] == b" ":
            # A second reading shows whether a cell has lost the space that it begins with.
            readers.append(self._reader(_lines_in(content), skips=False))
        limit = csv.field_size_limit(_LONGEST_FIELD)
        try:
            while some := [list(islice(reader, _ROWS)) for reader in readers]:
                if some[0] != some[-1]:
                    raise _OddError
                if not some[0]:
                    return
                rows = list(filter(None, some[0]))
                if len(set(map(len, rows))) > 1:
                    raise _OddError
                if rows:
                    yield list(zip(*rows, strict=True))
        finally:
            csv.field_size_limit(limit)

    def _in_rows(self, content: bytes) -> list[Cells]:
        """All columns, read row by row; DataError where the file is broken."""
        text = _decoded(self.file, content)
        rows = self._records(text)
        if len(set(map(len, rows))) > 1:
            self._name(
                [cell.strip() for cell in rows[0]], lambda place: [row[place] for row in rows if place < len(row)]
            )
            raise self._broken(rows, text)
        return [Cells([Cells.END.join(column)], len(rows)) for column in zip(*rows, strict=True)]

    def line_of(self, row: int) -> int:
        """The line of the file on which a row begins; the file is read again."""
        record = row + self.has_names
        lines = (line for line, cells in self._lines(_decoded(self.file, _content(self.file))) if cells != [])
        return next(islice(lines, record, None))

    def _reader(self, lines: Iterable[str], *, skips: bool = True) -> Any:
        return csv.reader(lines, delimiter=self._delimiter, skipinitialspace=skips, strict=skips)

    def _records(self, text: str) -> list[list[str]]:
        """All rows except empty lines, with the space around their cells."""
        limit = csv.field_size_limit(_LONGEST_FIELD)
        try:
            rows = [row for row in self._reader(_lines_of(text)) if row]
            return rows if self._is_exact(rows, text) else self._with_space(text)
        except csv.Error as error:
            *_, (line, _) = self._lines(text)
            what = "a quote is opened and never closed" if "end of data" in str(error) else f"{error}"
            raise DataError(
                f'{self.file} line {line}: {what}; write a field with quotes in it as "…", each quote in it doubled'
            ) from None
        finally:
            csv.field_size_limit(limit)

    def _is_exact(self, rows: list[list[str]], text: str) -> bool:
        """Whether no cell lost its leading space; reading twice costs less than checking each cell."""
        if f"{self._delimiter} " not in text and "\n " not in text and "\r " not in text and text[:1] != " ":
            return True
        return rows == [row for row in self._reader(_lines_of(text), skips=False) if row]

    def _with_space(self, text: str) -> list[list[str]]:
        """All rows with the leading space of their cells, which csv skips to see a quote behind it."""
        found, taken = [], list[str]()
        before_quote = re.compile(rf'(^|{re.escape(self._delimiter)}) +(?=")')
        for row in self._reader(_noted(_lines_of(text), taken)):
            if row:
                record = before_quote.sub(r"\1", "".join(taken))
                plain = next(self._reader(_lines_of(record), skips=False))
                found.append([own if own.lstrip(" ") == cell else cell for own, cell in zip(plain, row, strict=True)])
            taken.clear()
        return found

    def _lines(self, text: str) -> Iterator[tuple[int, list[str] | None]]:
        """Each record with the line on which it begins; the last is None where it cannot be read."""
        reader, line = self._reader(_lines_of(text)), 1
        while True:
            try:
                row = next(reader, None)
            except csv.Error:
                yield line, None
                return
            if row is None:
                return
            yield line, row
            line = reader.line_num + 1

    def _name(self, first: list[str], cells: Callable[[int], Iterable[str]]) -> None:
        """Name the columns after the first row; `cells` returns the cells of a column."""
        self.has_names = self._header if self._header is not None else _are_names(first, cells)
        self.notes, self.names = self._named(first, is_given=self._header is not None)

    def _named(self, first: list[str], *, is_given: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Notes and names of columns, from the first row."""
        numbered = tuple(f"column_{place}" for place in range(len(first)))
        if not self.has_names:
            why = "" if is_given else f" (its first row is data: {listed_names(first)})"
            last = f" … {numbered[-1]}" if len(first) > 1 else ""
            return (f"{self.file.name} has no header{why}; its columns are called {numbered[0]}{last}",), numbered
        names = tuple(name or number for name, number in zip(first, numbered, strict=True))
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        if twice:
            places = [str(place) for place, name in enumerate(names, 1) if name == twice[0]]
            fields = ", ".join(places[:_LISTED]) + (" …" if len(places) > _LISTED else "")
            raise DataError(
                f"{self.file} has the column {shown(twice[0])} {len(places):,} times (fields {fields}); "
                "give each a name of its own"
            )
        return tuple(
            f"field {place} of {self.file.name} has no name; it is called {name!r}"
            for place, name in enumerate(names, 1)
            if not first[place - 1]
        ), names

    def _broken(self, rows: list[list[str]], text: str) -> DataError:
        wanted = len(rows[0])
        broken = [place for place, row in enumerate(rows) if len(row) != wanted]
        row = rows[broken[0]]
        line = next(islice((line for line, cells in self._lines(text) if cells), broken[0], None))
        more = f", the first of {len(broken):,} such rows" if len(broken) > 1 else ""
        whose = "the header" if self.has_names else "the first row"
        delimiter = {"\t": "a tab"}.get(self._delimiter, repr(self._delimiter))
        cure = f"quote fields that hold {delimiter}" if len(row) > wanted else "complete it"
        return DataError(
            f"{self.file} line {line} has {len(row)} field{'s' * (len(row) != 1)} and {whose} {wanted}{more}: "
            f"{shown(self._delimiter.join(row))}; {cure}"
        )


def _lines_of(text: str) -> Iterable[str]:
    return io.StringIO(text, newline="")


def _lines_in(content: bytes) -> Iterable[str]:
    """The lines of a file, decoded one by one."""
    return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig", newline="")


def _blocks(content: bytes) -> Iterator[bytes]:
    """A file in blocks of whole lines, without a byte order mark."""
    start = 3 * content.startswith(b"\xef\xbb\xbf")
    size = max(_BLOCK, 1000 * (content.find(b"\n", start) - start))  # of many columns each has some cells in a block
    while start < len(content):
        end = content.rfind(b"\n", start, start + size) + 1 or content.find(b"\n", start + size) + 1 or len(content)
        yield content[start:end]
        start = end


def _noted(lines: Iterable[str], taken: list[str]) -> Iterator[str]:
    """Lines, each appended to a list as the reader takes it."""
    for line in lines:
        taken.append(line)
        yield line


def _are_names(first: list[str], cells: Callable[[int], Iterable[str]]) -> bool:
    """Whether the first row is a header: not all numbers, no number that recurs in its column, no picture's name."""
    if are_numbers(first) or any(cell.lower().endswith(PICTURES) for cell in first):
        return False
    numbers = [place for place, cell in enumerate(first) if cell and are_numbers([cell])]
    return not any(first[place] == cell.strip() for place in numbers for cell in islice(cells(place), 1, None))


def _content(file: Path) -> bytes:
    """All bytes of a text file, decompressed."""
    most = read_memory().free_bytes // MEMORY_A_BYTE
    try:
        content = read_bytes(file, most)
        if content.startswith(b"\x1f\x8b"):
            content = _unpacked(file, content, most)
    except StoreError as error:
        raise DataError(str(error)) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{file} is a damaged gzip file: {error}; make it again") from None
    known = next((words for start, words in _NO_TEXT.items() if content.startswith(start)), None)
    if known or b"\0" in content:
        what = f"it is {known}" if known else f"byte {content.index(0):,} is zero"
        raise DataError(f"{file} is no text file of UTF-8: {what}; save it as CSV in UTF-8")
    return content


def _unpacked(file: Path, packed: bytes, most: int) -> bytes:
    """The content of a gzip file; DataError where it is far larger than the file, or does not fit in memory."""
    most = min(most, max(SMALL_BYTES, MOST_RATIO * len(packed)))
    pieces, size = [], 0
    with gzip.GzipFile(fileobj=io.BytesIO(packed)) as opened:
        while piece := opened.read(_BLOCK):
            size += len(piece)
            if size > most:
                raise DataError(
                    f"{file} has {show_bytes(len(packed))} and unpacks to more than {show_bytes(most)}: too much for a "
                    "packed table, or for the memory; unpack it yourself if you trust it"
                )
            pieces.append(piece)
    return b"".join(pieces)


def _decoded(file: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # Positions count from the start of the file, and decoding leaves out a byte order mark.
        at = error.start + 3 * content.startswith(b"\xef\xbb\xbf")
        line = content.count(b"\n", 0, at) + 1
        raise DataError(
            f"{file} is not UTF-8: byte {content[at]:#04x} at position {at:,}, on line {line:,}; "
            f"save it as UTF-8, for example with: iconv -f cp1252 -t utf-8 {file.name} > utf8.csv"
        ) from None


def _delimiter(content: bytes) -> str:
    """The delimiter with which most rows have as many fields as the header."""
    text = content[: 4 * _SAMPLE + 4].decode("utf-8-sig", errors="ignore")[: _SAMPLE + 1]
    best, most = ",", (0.0, 1)
    for delimiter in _DELIMITERS:
        reader = csv.reader(io.StringIO(text[:_SAMPLE], newline=""), delimiter=delimiter, skipinitialspace=True)
        try:
            widths = [len(row) for row in islice(reader, 100) if row]
        except csv.Error:  # a field longer than csv reads: the delimiter of this file is not to be seen in it
            continue
        if len(text) > _SAMPLE and len(widths) < 100:
            widths = widths[:-1] or widths  # it may be cut
        if widths and widths[0] > 1:
            fit = (widths.count(widths[0]) / len(widths), widths[0])
            best, most = (delimiter, fit) if fit > most else (best, most)
    return best


def listed_names(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    return first_few([shown(name, _LONGEST_NAME) for name in names], _LISTED)
