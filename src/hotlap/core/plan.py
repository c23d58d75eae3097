"""A Plan says how a training is run, in four frozen parts, each resting on the one before.

It never says what is trained: plans differ by rounding and precision alone. Where that does not hold, as for
batch norms that see micro-batches, `Rig.cautions` says so and the ledger keeps it.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from hotlap.core.errors import PlanError, did_you_mean, shown
from hotlap.core.tricks import TRICKS

FORMAT = 1
"""Version of the plan file; a file of a newer one is refused."""

LARGEST = 2**31 - 1
"""The largest whole number a choice may have: what every reader of a plan file can hold."""

MOST_REPLAY_STEPS = 1024
"""Updates in one replay at most: a signal, an evaluation and a checkpoint wait for its end."""

MOST_RANKS = 64
"""Processes that share a batch on one machine, at most."""

MOST_WORKERS, MOST_PREFETCH = 1024, 128
"""Workers of any machine, and pieces that each of them keeps ready; how many workers are started is bounded by the
cores of the machine that a plan is used on."""

FEEDS = ("loader", "gather", "stream", "resident")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
LAYOUTS = ("as given", "channels_last")
DEPTHWISE = ("library", "direct")
OPTIMIZERS = ("plain", "fused")
MODES = ("eager", "captured")
COMPILED = ("no", "model", "blocks")


@dataclass(frozen=True, kw_only=True)
class Feed:
    """Where batches come from."""

    kind: str = "gather"
    """`loader`: samples fetched one by one and collated; `gather`: whole batches indexed out of tensors;
    `stream`: gathered into page-locked memory and copied to the GPU ahead, on a stream of their own;
    `resident`: all of the data held on the device and gathered there."""
    workers: int = 0
    """Processes that fetch ahead; 0 fetches in the training process. Only for `loader`."""
    prefetch: int | None = None
    """Pieces each worker keeps ready; None leaves torch's default. Only with workers."""
    persistent: bool = False
    """Keep workers alive from epoch to epoch. Only with workers."""
    pinned: bool = False
    """Fetch into page-locked memory. Only for `loader` on a GPU."""

    def __post_init__(self) -> None:
        wrong = [
            *_one_of("feed.kind", self.kind, FEEDS),
            *_whole("feed.workers", self.workers, least=0, most=MOST_WORKERS),
            *_whole("feed.prefetch", self.prefetch, least=1, most=MOST_PREFETCH, optional=True),
            *_flag("feed.persistent", self.persistent),
            *_flag("feed.pinned", self.pinned),
        ]
        sound = not wrong  # contradictions are sought between values that are right by themselves
        if sound and self.kind != "loader":
            if self.workers:
                wrong.append(
                    f"feed.workers={self.workers} contradicts feed.kind='{self.kind}', which reads in the "
                    "training process; use kind='loader' or workers=0"
                )
            if self.pinned:
                wrong.append(f"feed.pinned=True contradicts feed.kind='{self.kind}'; use kind='loader'")
        if sound and not self.workers:
            if self.prefetch is not None:
                wrong.append(f"feed.prefetch={self.prefetch} needs feed.workers of at least 1")
            if self.persistent:
                wrong.append("feed.persistent=True needs feed.workers of at least 1")
        _refuse(wrong)


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """In which numbers the maths is done."""

    precision: str = "fp32"
    """`fp32`: as the model is; `tf32`: fp32 whose products are rounded to 10 bits of fraction; `bf16`, `fp16`:
    autocast to that format, weights and updates stay as they are; fp16 with a scaled loss."""
    layout: str = "as given"
    """`as given`: tensors as the model has them; `channels_last`: images and their convolutions that way round."""
    depthwise: str = "library"
    """`library`: depthwise convolutions by the library that torch chooses, with channels last cuDNN, which compiles for
    seconds; `direct`: by kernels that are ready at once, hotlap's own or torch's."""
    optimizer: str = "plain"
    """`plain`: the optimizer's own loop; `fused`: one kernel for the whole update, where torch has it."""

    def __post_init__(self) -> None:
        _refuse(
            [
                *_one_of("numerics.precision", self.precision, PRECISIONS),
                *_one_of("numerics.layout", self.layout, LAYOUTS),
                *_one_of("numerics.depthwise", self.depthwise, DEPTHWISE),
                *_one_of("numerics.optimizer", self.optimizer, OPTIMIZERS),
            ]
        )


@dataclass(frozen=True, kw_only=True)
class Memory:
    """In which pieces an effective batch goes through the model, and what is kept of it for the backward pass."""

    micro_batch: int | None = None
    """Samples per forward and backward; None: the user's own batch size."""
    checkpoint: int = 0
    """Blocks, of those that the model repeats, whose activations are not kept but computed again in the backward
    pass; 0: none."""

    def __post_init__(self) -> None:
        _refuse(
            [
                *_whole("memory.micro_batch", self.micro_batch, least=1, optional=True),
                *_whole("memory.checkpoint", self.checkpoint, least=0),
            ]
        )


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How the work of a step reaches the device."""

    mode: str = "eager"
    """`eager`: operation by operation; `captured`: the whole step recorded once as a CUDA graph and replayed."""
    replay_steps: int = 1
    """Updates in one replay. More than 1 needs `captured` and a `resident` feed."""
    autotune: bool = False
    """Let cuDNN time its convolutions for each shape and keep the fastest."""
    compile: str = "no"
    """`no`: the model as it is; `model`: all of it by torch.compile; `blocks`: each of the blocks that it repeats."""
    ranks: int = 1
    """Processes that share each batch, one a GPU; on a machine without GPUs each has a part of the cores."""
    without: tuple[str, ...] = ()
    """Moves and tricks to leave out, by their names in `TRICKS`. May be given in any order, and as a list."""

    def __post_init__(self) -> None:
        wrong = [
            *_tricks("execution.without", self.without),
            *_one_of("execution.mode", self.mode, MODES),
            *_whole("execution.replay_steps", self.replay_steps, least=1, most=MOST_REPLAY_STEPS),
            *_flag("execution.autotune", self.autotune),
            *_one_of("execution.compile", self.compile, COMPILED),
            *_whole("execution.ranks", self.ranks, least=1, most=MOST_RANKS),
        ]
        if not wrong and self.replay_steps > 1 and self.mode != "captured":
            wrong.append(f"execution.replay_steps={self.replay_steps} needs execution.mode='captured'")
        _refuse(wrong)
        object.__setattr__(self, "without", tuple(sorted(set(self.without))))  # equal plans are equal, in any order


Part = Feed | Numerics | Memory | Execution

PARTS: dict[str, type[Part]] = {
    "feed": Feed,
    "numerics": Numerics,
    "memory": Memory,
    "execution": Execution,
}
"""The parts in the order in which they rest on each other."""

HOME = {f.name: part for part, kind in PARTS.items() for f in dataclasses.fields(kind)}
"""The part each choice belongs to; names are unique over all parts."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a training is run: printable, comparable, saved as a readable file."""

    feed: Feed = field(default_factory=Feed)
    numerics: Numerics = field(default_factory=Numerics)
    memory: Memory = field(default_factory=Memory)
    execution: Execution = field(default_factory=Execution)

    def __post_init__(self) -> None:
        _refuse(
            [
                f"{name} must be a {kind.__name__}, not {type(getattr(self, name)).__name__}"
                for name, kind in PARTS.items()
                if not isinstance(getattr(self, name), kind)
            ]
        )
        steps = self.execution.replay_steps
        if steps > 1 and self.feed.kind != "resident":
            _refuse(
                [
                    f"execution.replay_steps={steps} needs feed.kind='resident', not '{self.feed.kind}': "
                    "several updates at once need their data on the device"
                ]
            )

    def but(self, **choices: Any) -> Self:
        """This plan with some choices changed, each named by itself: `plan.but(precision="bf16")`."""
        unknown = [name for name in choices if name not in HOME]
        wrong = [f"no choice is called {name!r}{did_you_mean(name, HOME)}" for name in unknown]
        parts: dict[str, Part] = {}
        for part in PARTS:
            mine = {name: value for name, value in choices.items() if HOME.get(name) == part}
            try:
                parts[part] = dataclasses.replace(getattr(self, part), **mine)
            except PlanError as error:
                wrong += error.problems
        _refuse(wrong)
        return dataclasses.replace(self, **parts)  # type: ignore[arg-type]

    def with_feed(self, feed: Feed) -> Self:
        """This plan with another feed; several updates in one replay only where that brings them."""
        execution = self.execution
        if feed.kind != "resident" and execution.replay_steps > 1:
            execution = dataclasses.replace(execution, replay_steps=1)
        return dataclasses.replace(self, feed=feed, execution=execution)

    def choices(self) -> dict[str, Any]:
        """Every choice by its own name."""
        return {name: getattr(getattr(self, part), name) for name, part in HOME.items()}

    def changes(self, other: Self) -> dict[str, tuple[Any, Any]]:
        """What `other` chooses differently: name → (here, there)."""
        mine, theirs = self.choices(), other.choices()
        return {name: (mine[name], theirs[name]) for name in HOME if mine[name] != theirs[name]}

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """The parts as plain dictionaries."""
        return {part: {name: _plain(v) for name, v in vars(getattr(self, part)).items()} for part in PARTS}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """A plan from plain dictionaries; all unknown names and wrong values are reported at once."""
        wrong: list[str] = []
        parts: dict[str, Any] = {}
        if not isinstance(raw, Mapping):
            raise PlanError(f"a plan must be a table of parts, not {shown(raw)}")
        for part, values in raw.items():
            if part not in PARTS:
                wrong.append(f"no part of a plan is called {shown(part)}{did_you_mean(part, PARTS)}")
            elif not isinstance(values, Mapping):
                wrong.append(f"{part} must be a table of choices, not {shown(values)}")
            else:
                known = [f.name for f in dataclasses.fields(PARTS[part])]
                unknown = [name for name in values if name not in known]
                wrong += [f"{part} has no choice {shown(name)}{did_you_mean(name, known)}" for name in unknown]
                try:
                    parts[part] = PARTS[part](**{k: v for k, v in values.items() if k in known})
                except PlanError as error:
                    wrong += error.problems
        _refuse(wrong)
        return cls(**parts)

    def to_text(self) -> str:
        """The plan as a TOML file; a choice left open (None, or no names) is left out."""
        lines = ["# How hotlap runs a training. Use it again with --plan FILE.", f"hotlap_plan = {FORMAT}"]
        for part, values in self.to_dict().items():
            lines += ["", f"[{part}]"]
            lines += [f"{name} = {_toml(value)}" for name, value in values.items() if value not in (None, [])]
        return "\n".join(lines) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Self:
        """A plan from the text of a plan file."""
        try:
            raw = tomllib.loads(text)
        # A file of deep nesting exhausts the parser's stack, and a number of thousands of digits is
        # refused by Python itself, with a plain ValueError.
        except RecursionError:
            raise PlanError("not a plan file: nested too deeply") from None
        except ValueError as error:
            raise PlanError(f"not a plan file: {error}") from None
        version = raw.pop("hotlap_plan", None)
        if version is None:
            raise PlanError(f"not a plan file: the line 'hotlap_plan = {FORMAT}' is missing")
        if type(version) is not int or version < 1:
            raise PlanError(f"not a plan file: hotlap_plan={shown(version)} is no plan format")
        if version > FORMAT:
            raise PlanError(f"plan format {shown(version)} is newer than the {FORMAT} this hotlap reads; update hotlap")
        return cls.from_dict(raw)

    def __str__(self) -> str:
        feed = self.feed.kind
        if self.feed.workers:
            feed += f" with {self.feed.workers} worker{'s' if self.feed.workers > 1 else ''}"
        ahead = [f"prefetch {self.feed.prefetch}"] if self.feed.prefetch is not None else []
        extras = [name for name in ("persistent", "pinned") if getattr(self.feed, name)]
        feed = ", ".join([feed, *ahead, *extras])
        pieces = f"micro-batch {self.memory.micro_batch}" if self.memory.micro_batch else "batches whole"
        if self.memory.checkpoint:
            blocks = "block" if self.memory.checkpoint == 1 else "blocks"
            pieces += f", {self.memory.checkpoint} {blocks} checkpointed"
        numbers, execution = self.numerics.precision, self.execution.mode
        if self.numerics.layout != "as given":
            numbers += f", {self.numerics.layout}"
        if self.numerics.depthwise != "library":
            numbers += f", depthwise {self.numerics.depthwise}"
        if self.execution.replay_steps > 1:
            execution += f", {self.execution.replay_steps} steps a replay"
        if self.execution.autotune:
            execution += ", cuDNN autotuned"
        if self.execution.compile != "no":
            execution += f", {self.execution.compile} compiled"
        if self.execution.ranks > 1:
            execution += f", {self.execution.ranks} ranks"
        if self.execution.without:
            execution += f", without {', '.join(self.execution.without)}"
        return " · ".join((feed, numbers, f"{self.numerics.optimizer} optimizer", pieces, execution))


def _refuse(wrong: list[str]) -> None:
    if wrong:
        raise PlanError(*wrong)


def _one_of(name: str, value: object, known: tuple[str, ...]) -> list[str]:
    if isinstance(value, str) and value in known:
        return []
    return [f"{name}={shown(value)} is not a choice{did_you_mean(value, known)}"]


def _whole(name: str, value: object, *, least: int, most: int = LARGEST, optional: bool = False) -> list[str]:
    if optional and value is None:
        return []
    # bool is an int to Python; workers=True is a mistake all the same.
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        return [f"{name}={shown(value)} must be a whole number of at least {least}"]
    return [] if value <= most else [f"{name}={shown(value)} is too large; the most is {most}"]


def _flag(name: str, value: object) -> list[str]:
    return [] if isinstance(value, bool) else [f"{name}={shown(value)} must be True or False"]


def _tricks(name: str, value: object) -> list[str]:
    if not isinstance(value, (list, tuple)):
        return [f"{name}={shown(value)} must be a list of names; known: {', '.join(TRICKS)}"]
    unknown = [one for one in value if not isinstance(one, str) or one not in TRICKS]
    return [f"{name}: no trick is called {shown(one)}{did_you_mean(one, TRICKS)}" for one in unknown[: len(TRICKS)]]


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _toml(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    # Choices are words and numbers of hotlap's own, so a plain quoted string is always valid TOML.
    return f'"{value}"' if isinstance(value, str) else str(value)
