"""Every error hotlap raises on purpose.

    HotlapError
    ├── JobError       (ValueError)    the training asked for makes no sense; lists all mistakes at once
    ├── PlanError      (ValueError)    a plan is unknown, contradictory, or impossible here
    ├── DataError      (ValueError)    the data cannot be read as batches
    ├── MachineError   (RuntimeError)  the machine lacks what was demanded
    ├── StoreError     (OSError)       a file or folder cannot be used as asked
    ├── UsageError     (ValueError)    a command line makes no sense
    └── TrainingError  (RuntimeError)  the training itself cannot go on

A message says what happened, the value seen, and what to do, in one line each.
"""

from __future__ import annotations

import difflib
import importlib
import re
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from hotlap.core.terminal import clean_lines

TESTED_TORCH: Final = ("2.11", "2.13")
"""The versions of torch that hotlap is tested with; hotlap uses and names others."""


class HotlapError(Exception):
    """Root of all errors that are the user's to read; commands print them without a traceback."""

    def __str__(self) -> str:
        """The message, of which no terminal obeys anything; lines below the first are indented."""
        return clean_lines(super().__str__())


class JobError(HotlapError, ValueError):
    """The job has mistakes; `problems` holds one line for each."""

    def __init__(self, problems: Sequence[str]) -> None:
        # torch raises a worker's error anew from its text alone.
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__(listed("the job has", "mistake", self.problems))

    def __reduce__(self) -> tuple[Callable[..., JobError], tuple[tuple[str, ...]]]:
        return type(self), (self.problems,)


class PlanError(HotlapError, ValueError):
    """The plan is unknown, contradictory, or impossible here; `problems` holds one line for each."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__(listed("the plan has", "mistake", problems))

    def __reduce__(self) -> tuple[Callable[..., PlanError], tuple[str, ...]]:
        return type(self), self.problems


class DataError(HotlapError, ValueError):
    """The data cannot be read as batches."""


class MachineError(HotlapError, RuntimeError):
    """The machine lacks what was demanded of it."""


class StoreError(HotlapError, OSError):
    """A file or folder cannot be used as asked."""


class UsageError(HotlapError, ValueError):
    """A command line makes no sense: commands end with exit code 2."""


class TrainingError(HotlapError, RuntimeError):
    """The training itself cannot go on."""


class DivergedError(TrainingError):
    """The weights, or the answers, of a model are no longer finite."""


def library(name: str, what: str, package: str) -> Any:
    """An optional package; MachineError says what needs it and how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise MachineError(f"{what} needs {name.partition('.')[0]}: {install(package)}") from None


def install(package: str) -> str:
    """How to install a package, or an extra of hotlap such as [text], which no package index has yet."""
    return f"pip install '.{package}' in a clone of hotlap" if package.startswith("[") else f"pip install {package}"


def listed(head: str, noun: str, problems: Sequence[str]) -> str:
    """One problem as it is; several as a counted list, one line each."""
    if len(problems) == 1:
        return problems[0]
    lines = "".join(f"\n  - {problem}" for problem in problems)
    return f"{head} {len(problems)} {noun}s:{lines}"


def first_few(words: Sequence[str], most: int = 3, *, between: str = ", ") -> str:
    """The first of these words, and how many more there are."""
    return between.join(words[:most]) + (f" and {len(words) - most:,} more" if len(words) > most else "")


def shown(value: object, width: int = 60) -> str:
    """`value` as Python writes it, in one line of at most `width` characters, whatever it is."""
    try:
        text = reprlib.repr(value) if isinstance(value, (list, tuple, set, dict, int)) else repr(value)
    except Exception:  # a user's own __repr__ may do anything
        text = f"<{type(value).__name__}>"
    text = " ".join(text.split())
    return text if len(text) <= width else f"{text[: width - 2]} …"


def kind_of(value: object) -> str:
    """What `value` is, in a few words: its class, and itself as far as it is short."""
    return f"the class {value.__name__}" if isinstance(value, type) else f"{type(value).__name__} {shown(value, 40)}"


_ACCOUNT = re.compile(r" GPU \d+ has a total capacity of ")
_ENFORCED = re.compile(r"^\[enforce fail at [^\]]*\] \w+ == 0\. ")
"""The place in torch's own source that a full host's error begins with."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its kind where it has none; of full memory without torch's account."""
    lines = str(error).strip().splitlines()
    return _ENFORCED.sub("", _ACCOUNT.split(lines[0].strip())[0]) if lines else type(error).__name__


MOST_COMPARED, MOST_LISTED, LONGEST_COMPARED = 1000, 100, 100
"""Names that a wrong one is compared with, names that are listed, and characters of one at most."""


def did_you_mean(seen: object, known: Iterable[str]) -> str:
    """The words `; did you mean 'x'?` where `seen` is close to a known name, else the known names."""
    names = sorted(known)
    # A file may have thousands of columns, with names of any length: comparing them all would take minutes.
    word = seen.lower() if isinstance(seen, str) and len(seen) <= LONGEST_COMPARED else ""
    compared = [n.lower() for n in names[:MOST_COMPARED] if len(n) <= LONGEST_COMPARED]
    close = difflib.get_close_matches(word, compared, n=1)
    if close:
        match = next(n for n in names if n.lower() == close[0])
        return f"; did you mean {match!r}?"
    listed_names = [n if len(n) <= LONGEST_COMPARED else f"{n[: LONGEST_COMPARED - 2]} …" for n in names[:MOST_LISTED]]
    more = f" and {len(names) - MOST_LISTED:,} more" if len(names) > MOST_LISTED else ""
    return f"; known: {', '.join(listed_names)}{more}"
