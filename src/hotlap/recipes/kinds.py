"""The kind of a column, inferred from its cells: number, whole number, flag, date, category or text."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal, get_args

import numpy as np

from hotlap.core.errors import DataError, did_you_mean, shown

Kind = Literal["number", "whole number", "flag", "date", "category", "text", "empty"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Values = np.ndarray[Any, Any]

# fmt: off
_MISSING_WORDS = (
    "na", "n/a", "n.a.", "#n/a", "#na", "<na>", "nan", "-nan", "nat", "null", "(null)", "none", "nil",
    "", "-", "--", "?", ".", r"\n",
)
# fmt: on
MISSING = frozenset(
    form for word in _MISSING_WORDS for form in (word, word.upper(), word.capitalize(), word.replace("nan", "NaN"))
) | {"NaT", "<Na>"}
"""Cells that mean a missing value."""
LONGEST_CATEGORY = 50
"""Mean number of characters of the different values; above it a column is text, even if its values repeat."""

# Each pattern is of one cell and a line end, repeated: one match tests all cells of a column.
_WHOLE_NUMBERS = re.compile(r"(?:[-+]?(?:0|[1-9][0-9]*+)\n)*+")
_NUMBERS = re.compile(
    r"(?>[-+]?(?:(?:(?:0|[1-9][0-9]*+)(?:\.[0-9]*+)?+|\.[0-9]++)(?:[eE][-+]?[0-9]++)?+|(?i:infinity|inf))\n)*+"
)
_BEYOND_64_BITS = re.compile(r"[0-9]{19}")
_DECIMAL_COMMAS = re.compile(r"(?:[-+]?(?:0|[1-9][0-9]*+)(?:,[0-9]++)?+\n)*+")
_PLAIN_DATES = re.compile(
    r"(?:[0-9]{4}-[0-9]{2}-[0-9]{2}(?:[ T][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]{1,9})?)?)?\n)*+"
)
_DATE = re.compile(
    r"([0-9]{4}([-/.])[0-9]{2}(?:\2[0-9]{2}(?:[ T][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]{1,9})?)?)?)?)"
    r" ?(Z|UTC|[-+][0-9]{2}:?[0-9]{2}|[-+][0-9]{2})?"
)
_NO_OFFSET = np.timedelta64(0, "s")
_FLAGS = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}
_FLAG_PAIRS = (("false", "true"), ("no", "yes"))
MOST_FLAGS = 12
"""Most spellings of two words in a column of flags."""


class Cells:
    """The cells of a column as the file writes them, in a few long strings: a list takes ten times the memory."""

    END = "\0"
    """Separates cells: no text file contains it."""

    def __init__(self, parts: Sequence[str], count: int) -> None:
        """`parts` hold `count` cells in all, with END between them."""
        self.parts, self._count = parts, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(part.split(self.END) for part in self.parts)

    @property
    def first(self) -> str:
        """The first cell."""
        return self.parts[0].partition(self.END)[0]

    def without_first(self) -> Cells:
        """All cells but the first."""
        head, *rest = self.parts
        _, end, others = head.partition(self.END)
        return Cells([others, *rest] if end else rest, self._count - 1)

    @classmethod
    def concatenated(cls, columns: Sequence[Cells]) -> Cells:
        """The cells of several files, one below the other."""
        return cls([part for column in columns for part in column.parts], sum(map(len, columns)))


class UnfitError(ValueError):
    """A cell does not fit the kind that was asked for."""

    def __init__(self, word: str) -> None:
        self.word = word
        super().__init__(word)


@dataclass(frozen=True, kw_only=True, eq=False)
class Column:
    """A column of a table: its values as a numpy array."""

    name: str
    kind: Kind
    values: Values
    """By kind: float64 numbers, int64 whole numbers, bool flags, datetime64 dates, int32 codes of categories, str
    objects of text. A missing value is nan, 0, False, NaT, -1 or "". Dates are in UTC where the file names a time zone,
    in seconds, or in nanoseconds where there are fractions of a second."""
    categories: tuple[str, ...] = ()
    """The categories, sorted, which codes are indices of; of flags, the words for False and True."""
    missing: Values | None = None
    """bool: which values are missing; None where none is."""

    def __len__(self) -> int:
        return len(self.values)

    @property
    def present(self) -> Values:
        """bool: which values are not missing."""
        return np.ones(len(self), bool) if self.missing is None else ~self.missing

    def rows(self, indices: Any) -> Column:
        """The column at these rows (indices, a mask or a slice), with the same categories."""
        missing = None if self.missing is None else self.missing[indices]
        return Column(
            name=self.name,
            kind=self.kind,
            values=self.values[indices],
            categories=self.categories,
            missing=missing if missing is not None and missing.any() else None,
        )

    def texts(self) -> list[str]:
        """The values as texts; empty where a value is missing."""
        match self.kind:
            case "category" | "flag":
                words = np.asarray([*self.categories, ""], dtype=object)[self.values.astype(np.int64)]
            case "date":
                words = _date_texts(self.values)
            case _:
                words = np.asarray(list(map(str, self.values.tolist())), dtype=object)
        if self.missing is not None:
            words[self.missing] = ""
        found: list[str] = words.tolist()
        return found


def infer_column(name: str, cells: Cells | Sequence[str], wanted: Kind | None = None) -> Column:
    """A column of these cells: of the `wanted` kind, or of the kind that all of them fit.

    Space around a cell does not count. Numbers with leading zeros, and those that 64 bits do not hold, are identifiers:
    categories or text. Whole numbers are dates only if wanted: seconds since 1970. Raises UnfitError where a cell does
    not fit the wanted kind.
    """
    if isinstance(cells, Cells) and wanted in (None, "empty", "number", "whole number"):
        numbers = _number_column(name, cells, wanted)
        if numbers is not None:
            return numbers
    words = _Words.of_cells(cells)
    blank = MISSING.intersection(words.distinct)
    missing = words.where(blank)
    present = [word for word in words.distinct if word not in blank]
    if not present:
        return Column(name=name, kind="empty", values=np.full(len(words), np.nan), missing=missing)
    if wanted in ("category", "text"):
        return _word_column(name, words, present, blank, wanted)
    kind, parsed = (wanted, _parse_as(present, wanted)) if wanted and wanted != "empty" else _infer_kind(present)
    if kind is None:
        return _word_column(name, words, present, blank)
    missing_value, dtype = _STORED[kind]
    values = words.mapped({**dict.fromkeys(blank, missing_value), **parsed}, dtype)
    if kind == "date":
        values = to_seconds(values.view("datetime64[us]"))
    flags = _flag_words(words.distinct) if kind == "flag" else ()
    return Column(name=name, kind=kind, values=values, categories=flags, missing=missing)


def word_column(name: str, cells: Sequence[str]) -> Column:
    """A column of words, with the space around them: categories where few of them repeat often, else text."""
    words = _Words.of_cells(cells, strip=False)
    return _word_column(name, words, [word for word in words.distinct if word], {""})


def to_seconds(dates: Values) -> Values:
    """Dates in seconds; in nanoseconds where they have fractions of a second and these hold their range."""
    seconds = dates.astype("datetime64[s]")
    years = seconds[~np.isnat(seconds)].astype("datetime64[Y]").astype(np.int64) + 1970
    in_range = bool(((years >= 1678) & (years < 2262)).all())
    if not in_range or np.array_equal(seconds.astype(dates.dtype), dates, equal_nan=True):
        return seconds
    return dates.astype("datetime64[ns]")


def are_numbers(words: Iterable[str]) -> bool:
    """Whether all words are written as numbers."""
    return _all_match(_NUMBERS, words)


def check_kinds(kinds: Mapping[str, str], names: Collection[str], path: object) -> None:
    """Refuse kinds for missing columns, and unknown kinds."""
    for name, kind in kinds.items():
        if name not in names:
            raise DataError(f"{path} has no column {name!r}{did_you_mean(name, names)}")
        if kind not in KINDS:
            raise DataError(f"column {name!r} cannot be of the kind {shown(kind)}{did_you_mean(kind, KINDS)}")


# --- columns of numbers --------------------------------------------------------------------------------


def _number_column(name: str, cells: Cells, wanted: Kind | None) -> Column | None:
    """A column of numbers, parsed part by part to save memory; None where it may be of another kind."""
    texts: list[str] = []
    blanks: list[Values | None] = []
    is_whole = wanted != "number"
    for part in cells.parts:
        lines = _number_lines(part)
        if lines is None:
            return None
        text, blank = lines
        is_whole = is_whole and (not text or _WHOLE_NUMBERS.fullmatch(text) is not None)
        texts.append(text)
        blanks.append(blank)
    if not any(texts) or (wanted == "whole number" and not is_whole):
        return None
    kind: Kind = "whole number" if is_whole else "number"
    missing_value, dtype = _STORED[kind]
    values, missing, at = np.full(len(cells), missing_value, dtype), np.zeros(len(cells), bool), 0
    for text, blank in zip(texts, blanks, strict=True):
        if is_whole and _BEYOND_64_BITS.search(text):  # perhaps beyond: then they are identifiers
            return None
        parsed = np.fromstring(text, dtype, sep="\n")
        end = at + (len(parsed) if blank is None else len(blank))
        if blank is None:
            values[at:end] = parsed
        else:
            values[at:end][~blank] = parsed
            missing[at:end] = blank
        at = end
    return Column(name=name, kind=kind, values=values, missing=missing if missing.any() else None)


def _number_lines(part: str) -> tuple[str, Values | None] | None:
    """The numbers of a part, a line each, and which cells are missing; None where a cell is no number."""
    if "\n" in part or "\r" in part:
        return None
    text = part.replace(Cells.END, "\n") + "\n"
    if _NUMBERS.fullmatch(text):
        return text, None
    words = list(map(str.strip, part.split(Cells.END)))
    blank = np.fromiter(map(MISSING.__contains__, words), np.bool_, len(words))
    text = "".join(f"{word}\n" for word in words if word not in MISSING)
    if _NUMBERS.fullmatch(text):
        return text, blank if blank.any() else None
    return None


# --- inferring and parsing -----------------------------------------------------------------------------

Parsed = dict[str, Any]
"""The value of each word."""
_STORED: dict[str, tuple[Any, Any]] = {
    "number": (np.nan, np.float64),
    "whole number": (0, np.int64),
    "flag": (False, np.bool_),
    "date": (np.iinfo(np.int64).min, np.int64),
}
"""The value of a missing cell, and the dtype. Dates are parsed to microseconds, of which the lowest is NaT."""


def _infer_kind(words: Collection[str]) -> tuple[Kind | None, Parsed]:
    """The kind that all these words fit, and their values; None where they are no more than words."""
    parsers: list[tuple[Kind, Callable[[Collection[str]], bool], Callable[[Collection[str]], Parsed]]] = [
        ("whole number", partial(_all_match, _WHOLE_NUMBERS), _parse_whole_numbers),
        ("number", _are_numbers_or_commas, _parse_numbers),
        ("flag", _are_flags, _parse_flags),
        ("date", lambda words: _DATE.fullmatch(next(iter(words))) is not None, _parse_dates),
    ]
    for kind, fits, parse in parsers:
        if fits(words):
            try:
                return kind, parse(words)
            except UnfitError:
                return None, {}
    return None, {}


def _parse_as(words: Collection[str], kind: Kind) -> Parsed:
    """The values of these words as this kind; UnfitError where one does not fit."""
    if kind == "date" and _all_match(_WHOLE_NUMBERS, words):
        seconds = _parse_whole_numbers(words)
        for word, value in seconds.items():
            if abs(value) > 2**63 // 1_000_000 - 1:
                raise UnfitError(word)
        return {word: value * 1_000_000 for word, value in seconds.items()}
    parsers = {
        "number": _parse_numbers,
        "whole number": _parse_lenient_whole_numbers,
        "flag": _parse_flags,
        "date": _parse_dates,
    }
    return parsers[kind](words)


def _all_match(pattern: re.Pattern[str], words: Iterable[str]) -> bool:
    return pattern.fullmatch("\n".join(words) + "\n") is not None


def _are_numbers_or_commas(words: Collection[str]) -> bool:
    return _all_match(_NUMBERS, words) or _have_decimal_commas(words)


def _have_decimal_commas(words: Collection[str]) -> bool:
    """Whether commas are decimal points; where three digits follow every one, they may separate thousands."""
    if not _all_match(_DECIMAL_COMMAS, words):
        return False
    behind = {len(word.partition(",")[2]) for word in words if "," in word}
    return bool(behind - {3})


def _are_flags(words: Collection[str]) -> bool:
    if len(words) > MOST_FLAGS:
        return False
    lower = {word.lower() for word in words}
    return any(lower.issubset(pair) for pair in _FLAG_PAIRS)


def _parse_whole_numbers(words: Collection[str]) -> Parsed:
    found = _parse_each(words, int)
    for word in (min(found, key=found.__getitem__), max(found, key=found.__getitem__)):
        if not -(2**63) <= found[word] < 2**63:
            raise UnfitError(word)
    return found


def _parse_lenient_whole_numbers(words: Collection[str]) -> Parsed:
    """Also 3.0, as other programs write whole numbers where some are missing."""
    bare = {word: word.removesuffix(".0") for word in words}
    values = _parse_whole_numbers(list(dict.fromkeys(bare.values())))
    return {word: values[other] for word, other in bare.items()}


def _parse_numbers(words: Collection[str]) -> Parsed:
    if _have_decimal_commas(words):
        return {word: float(word.replace(",", ".")) for word in words}
    return _parse_each(words, float)


def _parse_flags(words: Collection[str]) -> Parsed:
    return _parse_each(words, lambda word: _FLAGS[word.lower()])


def _parse_dates(words: Collection[str]) -> Parsed:
    """Moments in UTC, to the microsecond.

    The year comes first, as in 2024-01-05, 2024/01/05 10:00 and 2024-01-05T10:00:00+01:00.
    """
    if _all_match(_PLAIN_DATES, words):
        return _parse_moments(words, list(words))
    bare, offsets = [], []
    for word in words:
        found = _DATE.fullmatch(word)
        if found is None:
            raise UnfitError(word)
        day, _, zone = found.groups()
        bare.append(day if word[4] == "-" else day.replace(word[4], "-", 2))
        offsets.append(_offset_s(zone) if zone else 0)
    return _parse_moments(words, bare, np.array(offsets, dtype="timedelta64[s]"))


def _parse_moments(words: Collection[str], bare: list[str], offsets: Any = _NO_OFFSET) -> Parsed:
    """Microseconds since 1970 of each word; `bare` are the words without their time zone."""
    try:
        moments = np.array(bare, dtype="datetime64[us]") - offsets
    except ValueError:  # a month of 13
        wrong = next(word for word, text in zip(words, bare, strict=True) if not _parses(np.datetime64, text))
        raise UnfitError(wrong) from None
    return dict(zip(words, moments.astype(np.int64).tolist(), strict=True))


def _offset_s(zone: str) -> int:
    """Seconds that a time zone is ahead of UTC."""
    if zone in ("Z", "UTC"):
        return 0
    seconds = 3600 * int(zone[1:3]) + 60 * int(zone[3:].lstrip(":") or 0)
    return -seconds if zone[0] == "-" else seconds


def _parse_each(words: Collection[str], read: Callable[[str], Any]) -> Parsed:
    try:
        found = dict(zip(words, map(read, words), strict=True))
    except (ValueError, LookupError):
        raise UnfitError(next(word for word in words if not _parses(read, word))) from None
    if "_" in "".join(words):  # Python reads 1_000, and files do not write it
        raise UnfitError(next(word for word in words if "_" in word))
    return found


def _parses(read: Callable[[str], Any], word: str) -> bool:
    try:
        read(word)
    except (ValueError, LookupError):
        return False
    return True


# --- columns of words ----------------------------------------------------------------------------------


class _Words:
    """The cells of a column, factorized: its different words in order of appearance, and the code of each cell."""

    def __init__(self, distinct: Sequence[str], codes: Values) -> None:
        self.distinct, self._codes = distinct, codes

    @classmethod
    def of_cells(cls, cells: Cells | Sequence[str], *, strip: bool = True) -> _Words:
        """The words of these cells, without the space around them."""
        code_of: dict[str, int] = {}
        codes = []
        for part in (part.split(Cells.END) for part in cells.parts) if isinstance(cells, Cells) else (cells,):
            words = list(map(str.strip, part)) if strip else part
            for word in dict.fromkeys(words):
                code_of.setdefault(word, len(code_of))
            codes.append(np.fromiter(map(code_of.__getitem__, words), np.int32, len(words)))
        return cls(list(code_of), np.concatenate(codes) if codes else np.zeros(0, np.int32))

    def __len__(self) -> int:
        return len(self._codes)

    def where(self, chosen: Collection[str]) -> Values | None:
        """Which cells are one of these words; None where none is."""
        found = self.mapped({word: word in chosen for word in self.distinct}, np.bool_)
        return found if found.any() else None

    def mapped(self, values: Mapping[str, Any], dtype: Any) -> Values:
        """The value of each cell's word."""
        found: Values = np.array([values[word] for word in self.distinct], dtype)[self._codes]
        return found


def _word_column(
    name: str, words: _Words, present: Collection[str], blank: Collection[str], wanted: Kind | None = None
) -> Column:
    missing = words.where(blank)
    count = len(words) - (0 if missing is None else int(missing.sum()))
    if (wanted or _category_or_text(present, count)) == "text":
        texts = words.mapped({word: "" if word in blank else word for word in words.distinct}, object)
        return Column(name=name, kind="text", values=texts, missing=missing)
    categories = sorted_words(present)
    codes = {**dict.fromkeys(blank, -1), **{word: code for code, word in enumerate(categories)}}
    values = words.mapped(codes, np.int32)
    return Column(name=name, kind="category", values=values, categories=categories, missing=missing)


def _category_or_text(distinct: Collection[str], count: int) -> Kind:
    """Categories are short, and few compared with the number of rows."""
    few = max(count // 5, min(20, count // 2))
    is_long = sum(map(len, distinct)) > LONGEST_CATEGORY * len(distinct)
    return "text" if is_long or len(distinct) > few else "category"


def sorted_words(words: Collection[str]) -> tuple[str, ...]:
    """Words sorted as numbers where all are numbers, else as text."""
    if are_numbers(words):
        return tuple(sorted(words, key=lambda word: (float(word), word)))
    return tuple(sorted(words))


def _flag_words(words: Sequence[str]) -> tuple[str, str]:
    """The words for False and True, in the spelling that comes first."""
    first: dict[str, str] = {}
    for word in words:
        first.setdefault(word.lower(), word)
    pair = next((pair for pair in (*_FLAG_PAIRS, ("0", "1")) if any(word in first for word in pair)), _FLAG_PAIRS[0])
    return first.get(pair[0], pair[0]), first.get(pair[1], pair[1])


def _date_texts(dates: Values) -> Values:
    """Dates as texts, without a time where all of them are days."""
    days = dates.astype("datetime64[D]")
    same = np.array_equal(days.astype(dates.dtype), dates, equal_nan=True)
    return np.datetime_as_string(days if same else dates).astype(object)
