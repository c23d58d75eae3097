"""CSV files as they are written: names of columns, and cells of text, each with its line."""

from __future__ import annotations

import csv
import gzip
import io
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from hotlap.core.errors import DataError, shown
from hotlap.recipes.kinds import are_numbers
from hotlap.recipes.picture_files import SUFFIXES as PICTURES

SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
_DELIMITERS = ",;\t|"
_SAMPLE = 64 * 1024
"""Characters by which the delimiter is found."""
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


class TextFile:
    """A CSV file. Raises DataError in one line, with file, line and value, where it is none."""

    def __init__(self, file: Path, header: bool | None) -> None:
        self.file = file
        text = _decoded(file, _content(file))
        self._delimiter = "\t" if ".tsv" in file.name.lower() else _delimiter(text)
        rows = self._records(text)
        if not rows:
            raise DataError(f"{file} is empty; give it a header and rows")
        self.has_names = header if header is not None else _are_names(rows)
        first = [cell.strip() for cell in rows[0]]
        self.notes, self.names = self._named(first, told=header is not None)
        if set(map(len, rows)) != {len(first)}:
            raise self._broken(rows, text)
        self._rows = rows[1:] if self.has_names else rows
        columns = list(zip(*self._rows, strict=True)) or [()] * len(first)
        self._cells = dict(zip(self.names, columns, strict=True))

    def __len__(self) -> int:
        return len(self._rows)

    def cells(self, name: str) -> Sequence[str]:
        """The cells of a column."""
        return self._cells[name]

    def line_of(self, row: int) -> int:
        """The line of the file on which a row begins; the file is read again."""
        record = row + self.has_names
        lines = (line for line, cells in self._lines(_decoded(self.file, _content(self.file))) if cells != [])
        return next(islice(lines, record, None))

    def _reader(self, lines: Iterable[str], *, skips: bool = True) -> Any:
        return csv.reader(lines, delimiter=self._delimiter, skipinitialspace=skips, strict=skips)

    def _records(self, text: str) -> list[list[str]]:
        """All rows but empty lines, with the space around their cells."""
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
        """Whether no cell lost the space that it begins with; a second reading costs less than to look at each."""
        if f"{self._delimiter} " not in text and "\n " not in text and "\r " not in text and text[:1] != " ":
            return True
        return rows == [row for row in self._reader(_lines_of(text), skips=False) if row]

    def _with_space(self, text: str) -> list[list[str]]:
        """All rows with the space that cells begin with: csv skips it, so that a quote behind it is one."""
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

    def _named(self, first: list[str], *, told: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Notes and names of columns, from the first row."""
        numbered = tuple(f"column_{place}" for place in range(len(first)))
        if not self.has_names:
            why = "" if told else f" (its first row is data: {listed_names(first)})"
            last = f" … {numbered[-1]}" if len(first) > 1 else ""
            return (f"{self.file.name} has no header{why}; its columns are called {numbered[0]}{last}",), numbered
        names = tuple(name or number for name, number in zip(first, numbered, strict=True))
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            places = [str(place) for place, name in enumerate(names, 1) if name == twice[0]]
            raise DataError(
                f"{self.file} has the column {twice[0]!r} {len(places)} times (fields {', '.join(places)}); "
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


def _noted(lines: Iterable[str], taken: list[str]) -> Iterator[str]:
    """Lines, each put into a list as it is taken."""
    for line in lines:
        taken.append(line)
        yield line


def _are_names(rows: list[list[str]]) -> bool:
    """Whether the first row holds names: not all numbers, no number that comes again below it, no picture's name."""
    first = [cell.strip() for cell in rows[0]]
    if are_numbers(first) or any(cell.lower().endswith(PICTURES) for cell in first):
        return False
    numbers = [place for place, cell in enumerate(first) if cell and are_numbers([cell])]
    return not any(place < len(row) and row[place].strip() == first[place] for place in numbers for row in rows[1:])


def _content(file: Path) -> bytes:
    try:
        content = file.read_bytes()
        return gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{file} is a damaged gzip file: {error}; make it again") from None
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror or error}") from None


def _decoded(file: Path, content: bytes) -> str:
    known = next((words for start, words in _NO_TEXT.items() if content.startswith(start)), None)
    if known or b"\0" in content:
        what = f"it is {known}" if known else f"byte {content.index(0):,} is zero"
        raise DataError(f"{file} is no text file of UTF-8: {what}; save it as CSV in UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # Bytes are counted in the file; the mark at its beginning is not part of what is decoded.
        at = error.start + 3 * content.startswith(b"\xef\xbb\xbf")
        line = content.count(b"\n", 0, at) + 1
        raise DataError(
            f"{file} is not UTF-8: byte {content[at]:#04x} at position {at:,}, on line {line:,}; "
            f"save it as UTF-8, for one by: iconv -f cp1252 -t utf-8 {file.name} > utf8.csv"
        ) from None


def _delimiter(text: str) -> str:
    """Of those that part the header, the one by which most rows have as many fields as it."""
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
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(shown(name, _LONGEST_NAME) for name in names[:_LISTED]) + more
