"""The kind of a column, recognised from its cells: numbers, flags, dates, categories or text."""

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
_NOTHING = (
    "na", "n/a", "n.a.", "#n/a", "#na", "<na>", "nan", "-nan", "nat", "null", "(null)", "none", "nil",
    "", "-", "--", "?", ".", r"\n",
)
# fmt: on
MISSING = frozenset(
    form for word in _NOTHING for form in (word, word.upper(), word.capitalize(), word.replace("nan", "NaN"))
) | {"NaT", "<Na>"}
"""How people write a missing value."""
LONG = 50
"""Mean number of characters above which a column is text, even if its values repeat."""

# A word and a line end, as often as they come: all words of a column are matched in one go.
_WHOLES = re.compile(r"(?:[-+]?(?:0|[1-9][0-9]*+)\n)*+")
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
_PAIRS = (("false", "true"), ("no", "yes"))
MOST_FLAGS = 12
"""Most spellings of two words."""


class Cells:
    """The cells of a column as the file writes them, in a few long strings: single ones take ten times the memory."""

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

    def behind_first(self) -> Cells:
        """All cells but the first."""
        head, *rest = self.parts
        _, end, others = head.partition(self.END)
        return Cells([others, *rest] if end else rest, self._count - 1)

    @classmethod
    def below(cls, columns: Sequence[Cells]) -> Cells:
        """The cells of several files, one below the other."""
        return cls([part for column in columns for part in column.parts], sum(map(len, columns)))


class UnfitError(ValueError):
    """A word that does not fit the kind asked for."""

    def __init__(self, word: str) -> None:
        self.word = word
        super().__init__(word)


@dataclass(frozen=True, kw_only=True, eq=False)
class Column:
    """A column of a table: its cells as numpy holds them."""

    name: str
    kind: Kind
    values: Values
    """float64 numbers, int64 whole numbers, bool flags, datetime64 dates (s, or ns where there are parts of seconds;
    in UTC where a zone is named), int32 codes of categories, str objects of text. Where nothing is: nan, 0, False,
    NaT, -1 and ""."""
    categories: tuple[str, ...] = ()
    """The words that codes stand for, in order; of flags, the words for False and True."""
    missing: Values | None = None
    """Where nothing is; None where something is everywhere."""

    def __len__(self) -> int:
        return len(self.values)

    @property
    def present(self) -> Values:
        """Where there is something."""
        return np.ones(len(self), bool) if self.missing is None else ~self.missing

    def rows(self, indices: Any) -> Column:
        """The column at these rows, with the same categories."""
        missing = None if self.missing is None else self.missing[indices]
        return Column(
            name=self.name,
            kind=self.kind,
            values=self.values[indices],
            categories=self.categories,
            missing=missing if missing is not None and missing.any() else None,
        )

    def texts(self) -> list[str]:
        """The cells as a file has them; empty where a value is missing."""
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


def recognised(name: str, texts: Cells | Sequence[str], wanted: Kind | None = None) -> Column:
    """A column of these cells, of the kind that all of them fit, or of the `wanted` kind.

    Space around a cell does not count. Numbers with leading zeros, and those that 64 bits do not hold, are names of
    things and no amounts: categories or text. Whole numbers are dates only if wanted: seconds since 1970.
    Raises UnfitError where a cell does not fit the wanted kind.
    """
    if isinstance(texts, Cells) and wanted in (None, "empty", "number", "whole number"):
        amounts = _amounts(name, texts, wanted)
        if amounts is not None:
            return amounts
    words = _Words.of(texts)
    blank = MISSING.intersection(words.distinct)
    missing = words.where(blank)
    present = [word for word in words.distinct if word not in blank]
    if not present:
        return Column(name=name, kind="empty", values=np.full(len(words), np.nan), missing=missing)
    if wanted in ("category", "text"):
        return _in_words(name, words, present, blank, wanted)
    kind, values = _as_kind(present, wanted) if wanted and wanted != "empty" else _found(present)
    if kind is None:
        return _in_words(name, words, present, blank)
    nothing, dtype = _STORED[kind]
    cells = words.each({**dict.fromkeys(blank, nothing), **values}, dtype)
    if kind == "date":
        cells = in_seconds(cells.view("datetime64[us]"))
    flags = _flag_words(words.distinct) if kind == "flag" else ()
    return Column(name=name, kind=kind, values=cells, categories=flags, missing=missing)


def in_words(name: str, words: Sequence[str]) -> Column:
    """A column of words: categories where few words repeat often, else text."""
    found = _Words.of(words, strip=False)
    return _in_words(name, found, [word for word in found.distinct if word], {""})


def in_seconds(dates: Values) -> Values:
    """Dates to the second, or to the nanosecond where they have fractions and the range allows it."""
    whole = dates.astype("datetime64[s]")
    years = whole[~np.isnat(whole)].astype("datetime64[Y]").astype(np.int64) + 1970
    in_range = bool(((years >= 1678) & (years < 2262)).all())
    if not in_range or np.array_equal(whole.astype(dates.dtype), dates, equal_nan=True):
        return whole
    return dates.astype("datetime64[ns]")


def are_numbers(words: Iterable[str]) -> bool:
    """Whether all words are written as numbers."""
    return _match(_NUMBERS, words)


def check_kinds(kinds: Mapping[str, str], names: Collection[str], path: object) -> None:
    """Refuse kinds for missing columns, and unknown kinds."""
    for name, kind in kinds.items():
        if name not in names:
            raise DataError(f"{path} has no column {name!r}{did_you_mean(name, names)}")
        if kind not in KINDS:
            raise DataError(f"column {name!r} cannot be of the kind {shown(kind)}{did_you_mean(kind, KINDS)}")


# --- columns of numbers --------------------------------------------------------------------------------


def _amounts(name: str, cells: Cells, wanted: Kind | None) -> Column | None:
    """A column of numbers, read part by part: its words are never all in memory. None where it may be anything else."""
    texts: list[str] = []
    blanks: list[Values | None] = []
    is_whole = wanted != "number"
    for part in cells.parts:
        found = _numbers_in(part)
        if found is None:
            return None
        text, blank = found
        is_whole = is_whole and (not text or _WHOLES.fullmatch(text) is not None)
        texts.append(text)
        blanks.append(blank)
    if not any(texts) or (wanted == "whole number" and not is_whole):
        return None
    kind: Kind = "whole number" if is_whole else "number"
    nothing, dtype = _STORED[kind]
    values, missing, at = np.full(len(cells), nothing, dtype), np.zeros(len(cells), bool), 0
    for text, blank in zip(texts, blanks, strict=True):
        if is_whole and _BEYOND_64_BITS.search(text):  # perhaps: then they are names of things, and no amounts
            return None
        read = np.fromstring(text, dtype, sep="\n")
        end = at + (len(read) if blank is None else len(blank))
        if blank is None:
            values[at:end] = read
        else:
            values[at:end][~blank] = read
            missing[at:end] = blank
        at = end
    return Column(name=name, kind=kind, values=values, missing=missing if missing.any() else None)


def _numbers_in(part: str) -> tuple[str, Values | None] | None:
    """The numbers of a part, a line each, and where values are missing; None where other cells are among them."""
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


# --- which kind it is ----------------------------------------------------------------------------------

Parsed = dict[str, Any]
"""What each word means."""
_STORED: dict[str, tuple[Any, Any]] = {
    "number": (np.nan, np.float64),
    "whole number": (0, np.int64),
    "flag": (False, np.bool_),
    "date": (np.iinfo(np.int64).min, np.int64),
}
"""The value for a missing cell, and the dtype; dates are microseconds at first, and the smallest one is NaT."""


def _found(words: Collection[str]) -> tuple[Kind | None, Parsed]:
    """The kind that all these words are written as, and what they mean; None where they are words."""
    readers: list[tuple[Kind, Callable[[Collection[str]], bool], Callable[[Collection[str]], Parsed]]] = [
        ("whole number", partial(_match, _WHOLES), _wholes),
        ("number", _are_amounts, _numbers),
        ("flag", _are_flags, _flags),
        ("date", lambda words: _DATE.fullmatch(next(iter(words))) is not None, _dates),
    ]
    for kind, fits, read in readers:
        if fits(words):
            try:
                return kind, read(words)
            except UnfitError:
                return None, {}
    return None, {}


def _as_kind(words: Collection[str], kind: Kind) -> tuple[Kind, Parsed]:
    """The values of these words as the kind asked for."""
    if kind == "date" and _match(_WHOLES, words):
        seconds = _wholes(words)
        for word, value in seconds.items():
            if abs(value) > 2**63 // 1_000_000 - 1:
                raise UnfitError(word)
        return kind, {word: value * 1_000_000 for word, value in seconds.items()}
    readers = {"number": _numbers, "whole number": _lenient_wholes, "flag": _flags, "date": _dates}
    return kind, readers[kind](words)


def _match(pattern: re.Pattern[str], words: Iterable[str]) -> bool:
    return pattern.fullmatch("\n".join(words) + "\n") is not None


def _are_amounts(words: Collection[str]) -> bool:
    return _match(_NUMBERS, words) or _have_decimal_commas(words)


def _have_decimal_commas(words: Collection[str]) -> bool:
    """Whether commas are decimal points; where three digits follow every one, they may separate thousands."""
    if not _match(_DECIMAL_COMMAS, words):
        return False
    behind = {len(word.partition(",")[2]) for word in words if "," in word}
    return bool(behind - {3})


def _are_flags(words: Collection[str]) -> bool:
    if len(words) > MOST_FLAGS:
        return False
    lower = {word.lower() for word in words}
    return any(lower.issubset(pair) for pair in _PAIRS)


def _wholes(words: Collection[str]) -> Parsed:
    found = _parsed(words, int)
    for word in (min(found, key=found.__getitem__), max(found, key=found.__getitem__)):
        if not -(2**63) <= found[word] < 2**63:
            raise UnfitError(word)
    return found


def _lenient_wholes(words: Collection[str]) -> Parsed:
    """Also values such as 3.0, which other programs write where some are missing."""
    bare = {word: word.removesuffix(".0") for word in words}
    values = _wholes(list(dict.fromkeys(bare.values())))
    return {word: values[other] for word, other in bare.items()}


def _numbers(words: Collection[str]) -> Parsed:
    if _have_decimal_commas(words):
        return {word: float(word.replace(",", ".")) for word in words}
    return _parsed(words, float)


def _flags(words: Collection[str]) -> Parsed:
    return _parsed(words, lambda word: _FLAGS[word.lower()])


def _dates(words: Collection[str]) -> Parsed:
    """Moments in UTC, to the microsecond.

    The year comes first, as in 2024-01-05, 2024/01/05 10:00 and 2024-01-05T10:00:00+01:00.
    """
    if _match(_PLAIN_DATES, words):
        return _moments(words, list(words))
    bare, offsets = [], []
    for word in words:
        found = _DATE.fullmatch(word)
        if found is None:
            raise UnfitError(word)
        day, _, zone = found.groups()
        bare.append(day if word[4] == "-" else day.replace(word[4], "-", 2))
        offsets.append(_offset_s(zone) if zone else 0)
    return _moments(words, bare, np.array(offsets, dtype="timedelta64[s]"))


def _moments(words: Collection[str], bare: list[str], offsets: Any = _NO_OFFSET) -> Parsed:
    """Microseconds since 1970 of each word, which is `bare` without its zone."""
    try:
        moments = np.array(bare, dtype="datetime64[us]") - offsets
    except ValueError:  # a month of 13
        raise UnfitError(next(filter(None, map(_no_date, words, bare)))) from None
    return dict(zip(words, moments.astype(np.int64).tolist(), strict=True))


def _no_date(word: str, bare: str) -> str | None:
    try:
        np.datetime64(bare)
    except ValueError:
        return word
    return None


def _offset_s(zone: str) -> int:
    """Seconds that a zone is ahead of UTC."""
    if zone in ("Z", "UTC"):
        return 0
    seconds = 3600 * int(zone[1:3]) + 60 * int(zone[3:].lstrip(":") or 0)
    return -seconds if zone[0] == "-" else seconds


def _parsed(words: Collection[str], read: Callable[[str], Any]) -> Parsed:
    try:
        found = dict(zip(words, map(read, words), strict=True))
    except (ValueError, LookupError):
        raise UnfitError(next(word for word in words if not _reads(read, word))) from None
    if "_" in "".join(words):  # Python reads 1_000, and files do not write it
        raise UnfitError(next(word for word in words if "_" in word))
    return found


def _reads(read: Callable[[str], Any], word: str) -> bool:
    try:
        read(word)
    except (ValueError, LookupError):
        return False
    return True


# --- how it is kept ------------------------------------------------------------------------------------


class _Words:
    """The words of a column: each once, in the order in which they come, and for every cell the number of its word."""

    def __init__(self, distinct: Sequence[str], numbers: Values) -> None:
        self.distinct, self._numbers = distinct, numbers

    @classmethod
    def of(cls, texts: Cells | Sequence[str], *, strip: bool = True) -> _Words:
        """The words of these cells, without the space around them."""
        known: dict[str, int] = {}
        numbers = []
        for part in (part.split(Cells.END) for part in texts.parts) if isinstance(texts, Cells) else (texts,):
            words = list(map(str.strip, part)) if strip else part
            for word in dict.fromkeys(words):
                known.setdefault(word, len(known))
            numbers.append(np.fromiter(map(known.__getitem__, words), np.int32, len(words)))
        return cls(list(known), np.concatenate(numbers) if numbers else np.zeros(0, np.int32))

    def __len__(self) -> int:
        return len(self._numbers)

    def where(self, blank: Collection[str]) -> Values | None:
        """Which cells are one of these words; None where there is none."""
        found = self.each({word: word in blank for word in self.distinct}, np.bool_)
        return found if found.any() else None

    def each(self, values: Mapping[str, Any], dtype: Any) -> Values:
        """The value of each cell's word."""
        found: Values = np.array([values[word] for word in self.distinct], dtype)[self._numbers]
        return found


def _in_words(
    name: str, words: _Words, present: Collection[str], blank: Collection[str], wanted: Kind | None = None
) -> Column:
    missing = words.where(blank)
    count = len(words) - (0 if missing is None else int(missing.sum()))
    if (wanted or _kind_of_words(present, count)) == "text":
        texts = words.each({word: "" if word in blank else word for word in words.distinct}, object)
        return Column(name=name, kind="text", values=texts, missing=missing)
    categories = in_order(present)
    codes = {**dict.fromkeys(blank, -1), **{word: code for code, word in enumerate(categories)}}
    values = words.each(codes, np.int32)
    return Column(name=name, kind="category", values=values, categories=categories, missing=missing)


def _kind_of_words(distinct: Collection[str], count: int) -> Kind:
    """Categories are short, and few compared with the rows."""
    few = max(count // 5, min(20, count // 2))
    is_long = sum(map(len, distinct)) > LONG * len(distinct)
    return "text" if is_long or len(distinct) > few else "category"


def in_order(words: Collection[str]) -> tuple[str, ...]:
    """Words by their value where all are numbers, else by their letters."""
    if are_numbers(words):
        return tuple(sorted(words, key=lambda word: (float(word), word)))
    return tuple(sorted(words))


def _flag_words(words: Sequence[str]) -> tuple[str, str]:
    """The words for False and True, as the file has them first."""
    first: dict[str, str] = {}
    for word in words:
        first.setdefault(word.lower(), word)
    pair = next((pair for pair in (*_PAIRS, ("0", "1")) if any(word in first for word in pair)), _PAIRS[0])
    return first.get(pair[0], pair[0]), first.get(pair[1], pair[1])


def _date_texts(dates: Values) -> Values:
    """Days as days, others with their time."""
    days = dates.astype("datetime64[D]")
    same = np.array_equal(days.astype(dates.dtype), dates, equal_nan=True)
    return np.datetime_as_string(days if same else dates).astype(object)
