"""The options of a recipe, from the command line or a file; each run writes the file that repeats it."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import textwrap
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_type_hints

from hotlap.core.errors import JobError, StoreError, did_you_mean, shown
from hotlap.core.units import MIB, read_seconds
from hotlap.store.files import read_text

MOST, MOST_WHOLE = 1e30, 1_000_000
"""Most that a number, and a whole number, may be, unless the option has its own bound."""
OPTIONS = "options.toml"
"""In the folder of a recipe's run: what was asked for."""
MOST_FILE_BYTES = MIB
"""Of an options file; a run's has some hundred."""
_TYPES = {str: "TEXT", int: "INTEGER", float: "NUMBER", bool: "YES|NO"}
EPOCHS = {"fast": 1 / 3, "balanced": 1.0, "best": 2.0}
"""The profiles, and how many epochs each trains: a multiple of the recipe's own."""
LONGEST_WORD, MOST_WORDS = 4096, 100
"""Characters of a word, as a path may have them, and words in a list."""


def option(default: Any, words: str, *, most: float | None = None) -> Any:
    """A field of options with what help says of it; a number is at most `most`."""
    usual = MOST_WHOLE if isinstance(default, int) else MOST
    return field(default=default, metadata={"help": words, "most": usual if most is None else most})


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of every recipe; each recipe extends them. All are words, numbers or lists of words."""

    PROFILES: ClassVar[Mapping[str, Mapping[str, Any]]] = {"best": {"patience": 6}}
    """The values that other options have under a profile, unless they are given."""

    data: str = option("", "a CSV or Parquet file, or a folder of them")
    target: str = option("", "the column to predict; the default is a column with a usual name, such as label")
    valid: str = option("", "a file to judge by; the default is to hold out a part of the data")
    valid_share: float = option(0.2, "the share of the rows to hold out")
    group: str = option("", "a column; rows of one group are all trained on, or all held out")
    test: str = option("", "a file to predict at the end")
    epochs: int = option(0, "passes over the data; 0 leaves it to the recipe")
    batch_size: int = option(64, "samples in an update")
    lr: float = option(0.0, "the highest learning rate; 0 leaves it to the recipe")
    patience: int = option(3, "evaluations without improvement before the training stops")
    seed: int = option(0, "seed of the first weights, the order and the held-out rows", most=2**63 - 1)
    device: str = option("auto", "device: auto, cpu, cuda or cuda:N")
    gpus: str = option("", "GPUs that share each batch of a network: a number, or all; the default is one")
    plan: str = option("auto", "how to train: auto, off, max, a plan file, or a run folder to replay")
    warm_up: float = option(0.05, "the share of updates in which the learning rate rises")
    weight_decay: float = option(0.01, "weight decay of AdamW")
    balance: bool = option(True, "give rare classes a higher weight")
    finish_in: str = option("", "the time for all of it, such as 90s, 15m or 1h 30m; what does not fit is left out")
    profile: str = option("", "how much to train: fast (less than usual), balanced, or best (more)")
    trials: int = option(0, "trainings with other values, of which the best is kept; 0: one of each model", most=10_000)
    onnx: bool = option(False, "write the best model as model.onnx too")
    log: str = option("", "where metrics go too: tensorboard, trackio or wandb; several with commas between them")

    def __post_init__(self) -> None:
        wrong = below_one(self, "batch_size", "patience")
        wrong += [
            f"{name}={getattr(self, name)} is below 0" for name in ("epochs", "trials") if getattr(self, name) < 0
        ]
        wrong += outside(self, seed=(0, 2**63 - 1), lr=(0, MOST), warm_up=(0, 1), weight_decay=(0, MOST))
        wrong += _too_much(self)
        if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", self.device):
            wrong.append(f"device={shown(self.device)} is none of auto, cpu, cuda, cuda:N")
        if not re.fullmatch(r"|all|[1-9][0-9]?", self.gpus):
            wrong.append(f"gpus={shown(self.gpus)} must be a whole number of at least 1, or all")
        if self.finish_in and not _is_time(self.finish_in):
            wrong.append(f'finish_in={shown(self.finish_in)} is no time: give seconds, or "90s", "15m", "1h 30m"')
        if self.profile:
            wrong += unknown_words(self, profile=EPOCHS)
        if not 0 < self.valid_share < 1:
            wrong.append(f"valid_share={self.valid_share} must be between 0 and 1")
        if wrong:
            raise JobError(wrong)

    def epochs_of(self, usual: int) -> int:
        """Epochs to train where a recipe has so many by itself."""
        return self.epochs or max(1, round(usual * EPOCHS.get(self.profile, 1.0)))

    @property
    def gpus_wanted(self) -> int | Literal["all"] | None:
        """The GPUs that share each batch, as `fit` takes them."""
        return "all" if self.gpus == "all" else int(self.gpus) if self.gpus else None

    @property
    def judged_at_once(self) -> int:
        """Samples that are answered at a time: without gradients more of them fit than are trained on."""
        return 4 * self.batch_size

    def leaves_one(self, samples: int) -> bool:
        """Whether the last batch would hold a single sample, of which a batch norm can take no spread."""
        return samples % self.batch_size == 1 < samples

    def _judged_within(self, most: int, one: int) -> int:
        """The same where samples of size `one` are to be of size `most` together: a power of 2 of them.

        An odd number may take long: 19,200 windows by 6,553 took the LSTM in 16 bits on an H200 8 times as by 4,096.
        """
        return max(4 * self.batch_size, 1 << max(0, (most // one).bit_length() - 1))


def _too_much(options: Options) -> list[str]:
    """A line for each whole number, word and list that is larger than any that makes sense."""
    found = []
    for one in fields(options):
        value, most = getattr(options, one.name), one.metadata["most"]
        if isinstance(value, int) and value > most:  # of those with a point, each recipe says the range
            found.append(f"{one.name}={shown(value)} is too large; the most is {most:,}")
        elif isinstance(value, tuple) and len(value) > MOST_WORDS:
            found.append(f"{one.name} has {len(value):,} words; the most is {MOST_WORDS}")
        words = value if isinstance(value, tuple) else (value,) if isinstance(value, str) else ()
        longest = max(map(len, words), default=0)
        if longest > LONGEST_WORD:
            found.append(f"{one.name} has a word of {longest:,} characters; the most is {LONGEST_WORD:,}")
    return found


def outside(options: Options, **ranges: tuple[float, float]) -> list[str]:
    """A line for each option that is not within its range, both ends allowed."""
    return [
        f"{name}={shown(getattr(options, name))} must be from {least} to {most}"
        if most < MOST
        else f"{name}={shown(getattr(options, name))} must be a number of at least {least}"
        for name, (least, most) in ranges.items()
        if not least <= getattr(options, name) <= most
    ]


def below_one(options: Options, *names: str) -> list[str]:
    """A line for each of these options that is below 1."""
    return [
        f"{name}={shown(getattr(options, name))} must be at least 1" for name in names if getattr(options, name) < 1
    ]


def unknown_words(options: Options, **known: Collection[str]) -> list[str]:
    """A line for each option that is none of its known words."""
    return [
        f"{name}={shown(getattr(options, name))} must be one of {', '.join(words)}"
        for name, words in known.items()
        if getattr(options, name) not in words
    ]


@dataclass(frozen=True, kw_only=True)
class Calling:
    """The options of `hotlap train` itself, which a file may set; the file of a run does not."""

    out: str = ""
    retrain: bool = False
    json: bool = False
    quiet: bool = False


T = TypeVar("T", bound=Options)


def options_of(kind: type[T], file: Path | None, given: Mapping[str, Any]) -> T:
    """The options of a recipe: those given, else those of the file, of the profile, or as the recipe has them.

    Words are read as what the option is. Raises JobError with all mistakes at once, those of a file's `Calling` too.
    """
    theirs, calling = _parted(file)
    values, wrong = _values(kind, {**theirs, **given})
    values = {**kind.PROFILES.get(values.get("profile", ""), {}), **values}
    wrong += _values(Calling, calling)[1]
    if wrong:
        raise JobError(wrong)
    return kind(**values)


def calling_of(file: Path | None) -> Calling:
    """What a file says of the call; JobError where it cannot be that."""
    values, wrong = _values(Calling, _parted(file)[1])
    if wrong:
        raise JobError(wrong)
    return Calling(**values)


def _parted(file: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a file says of a recipe, and of the call."""
    said = _read(file) if file is not None else {}
    calling = {one.name for one in fields(Calling)}
    parts = [{name: value for name, value in said.items() if (name in calling) is its} for its in (False, True)]
    return parts[0], parts[1]


def _values(kind: type[Any], given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The values of fields by their names, and what is wrong with them."""
    kinds, wrong = get_type_hints(kind), list[str]()
    known = [one.name for one in fields(kind)]
    values: dict[str, Any] = {}
    for name, value in given.items():
        plain = name.replace("-", "_")
        if plain not in known:
            wrong.append(f"no option is called {shown(name)}{did_you_mean(plain, known)}")
            continue
        if value is None and kinds[plain] is not bool:
            wrong.append(f"--{name} needs a value: {_word(kinds[plain])}")
            continue
        if isinstance(value, list) and kinds[plain] != tuple[str, ...]:
            wrong.append(f"--{name} is given {len(value)} times ({', '.join(map(str, value))}); give it once")
            continue
        try:
            values[plain] = True if value is None else _as(kinds[plain], value)
        except ValueError:
            wrong.append(f"{plain}={shown(value)} must be {_word(kinds[plain])}")
    return values, wrong


def as_file(recipe: str, options: Options) -> str:
    """The options as the text of a file that repeats the run."""
    lines = [f"# hotlap train {recipe} --options THIS_FILE", f'recipe = "{recipe}"']
    for one in fields(options):
        value = getattr(options, one.name)
        # JSON's words, numbers and lists of words are TOML's too.
        lines.append(f"{one.name} = {json.dumps(list(value) if isinstance(value, tuple) else value)}")
    return "\n".join(lines) + "\n"


def option_lines(kind: type[Options], width: int) -> list[str]:
    """Every option with its type, a sentence and its default, wrapped to a width.

    `data` and `target` come first, then the recipe's own.
    """
    hints, shared = get_type_hints(kind), {one.name for one in fields(Options)}
    rows = sorted(fields(kind), key=lambda one: (one.name not in ("data", "target"), one.name in shared))
    names = [f"--{one.name.replace('_', '-')} {_TYPES.get(hints[one.name], 'LIST')}" for one in rows]
    left, lines = max(map(len, names)) + 4, []
    for name, one in zip(names, rows, strict=True):
        words = one.metadata["help"]
        text = f"{words[:1].upper()}{words[1:]}.{_default(one.default)}"
        lines += textwrap.wrap(
            text, max(width, left + 30), initial_indent=f"  {name:<{left - 2}}", subsequent_indent=" " * left
        )
    return lines


def as_json(kind: type[Options]) -> dict[str, dict[str, Any]]:
    """The same for machines: type, default and words of each option."""
    hints = get_type_hints(kind)
    return {
        one.name: {
            "type": _TYPES.get(hints[one.name], "LIST").lower(),
            "default": one.default,
            "help": one.metadata["help"],
        }
        for one in fields(kind)
    }


def from_words(words: Sequence[str]) -> dict[str, Any]:
    """Options as a command line has them: `--name value`, or `--name=value`; a name that comes again is a list.

    A name without a value, as those that are true or false may be given, has None.
    """
    found: dict[str, Any] = {}
    at = 0
    while at < len(words):
        word = words[at]
        if not word.startswith("--") or word == "--":
            hint = f"; did you mean --data {word}?" if Path(word).exists() else "; options are --name value"
            raise JobError([f"{shown(word)} is no option{hint}"])
        name, sign, value = word[2:].partition("=")
        at += 1
        if not sign and (at == len(words) or words[at].startswith("--")):
            found[name] = None
            continue
        if not sign:
            value = words[at]
            at += 1
        before = found.get(name)
        found[name] = value if before is None else [*(before if isinstance(before, list) else [before]), value]
    return found


def run_of(folder: Path) -> Path | None:
    """The recipe's run that a folder is, or of which it is a model or fold; None where it is none."""
    outer = folder.parent.parent if folder.parent.name in ("models", "folds") else folder
    return next((one for one in (folder, outer) if (one / OPTIONS).is_file()), None)


def _read(file: Path) -> dict[str, Any]:
    try:
        said = tomllib.loads(read_text(file, MOST_FILE_BYTES))
    except RecursionError:
        raise StoreError(f"{file} is no options file: it is nested too deeply") from None
    except ValueError as error:
        raise StoreError(f"{file} is no options file: {error}") from None
    said.pop("recipe", None)
    return said


def recipe_in(file: Path) -> str | None:
    """The recipe that an options file belongs to, where it says so."""
    try:
        found = tomllib.loads(read_text(file, MOST_FILE_BYTES)).get("recipe")
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def _as(kind: Any, value: Any) -> Any:
    if kind is str and isinstance(value, str):
        return value
    if kind is bool:
        if isinstance(value, bool):
            return value
        flags = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if isinstance(value, str) and value.lower() in flags:
            return flags[value.lower()]
    if kind is int and isinstance(value, (int, str)) and not isinstance(value, bool):
        return int(value)
    if kind is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    if kind == tuple[str, ...]:
        listed = value.split(",") if isinstance(value, str) else [value] if isinstance(value, int) else value
        if isinstance(listed, (list, tuple)) and all(isinstance(one, (str, int)) for one in listed):
            words = [str(one).strip() for one in listed if not isinstance(one, bool)]
            if len(words) == len(listed):
                return tuple(word for word in words if word)
    raise ValueError


def _word(kind: Any) -> str:
    words = {str: "a word", int: "a whole number", float: "a number", bool: "true or false"}
    return words.get(kind, "words, separated by commas")


def _default(value: Any) -> str:
    if value in ("", (), dataclasses.MISSING):
        return ""
    if isinstance(value, bool):
        value = "yes" if value else "no"
    return f" [default: {','.join(value) if isinstance(value, tuple) else value}]"


def _is_time(words: str) -> bool:
    try:
        return read_seconds(words) > 0
    except ValueError:
        return False


def exists(path: str | Path) -> bool:
    """Whether anything is there."""
    return _is(Path.exists, path)


def is_file(path: str | Path) -> bool:
    """Whether a file is there."""
    return _is(Path.is_file, path)


def is_folder(path: str | Path) -> bool:
    """Whether a folder is there."""
    return _is(Path.is_dir, path)


def _is(asked: Callable[[Path], bool], path: str | Path) -> bool:
    try:
        return asked(Path(path))
    except (OSError, ValueError):
        return False
