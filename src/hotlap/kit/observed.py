"""What a diagnosis observes of a script: plain values that pass between the script's process and hotlap's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def place(file: str, line: int) -> str:
    """A line as `train.py:31`; a file outside the current folder keeps its whole path."""
    path = Path(file)
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{line}"


@dataclass(frozen=True, kw_only=True)
class LineCost:
    """What a line of the user costs in each update."""

    where: str
    what: str = ""
    """The call at it, or the kind of its work."""
    update_s: float
    times: float = 1.0
    """Calls an update."""
    size: int = 0
    """Bytes a call."""
    caller: str = ""
    """The line of the training loop that leads there, if it is known."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Seconds of the same work done in two ways."""

    now_s: float
    then_s: float

    @property
    def saved(self) -> float:
        """The part of the time that the second way saves; 0 if it is slower."""
        return max(0.0, 1 - self.then_s / self.now_s) if self.now_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class EvaluationSeen:
    """An evaluation, and its calls of the model."""

    seconds: float
    """Of an evaluation."""
    every: float
    """Updates from one to the next."""
    with_grad_s: float = 0.0
    """Of its calls of the model that record a graph."""
    where: str = ""
    """The line with the first such call."""
    mode: str = "eval"
    """Whether the model was in `train` or `eval` mode."""
    calls: Pair | None = None
    """Such a call as it is, and without gradients."""


@dataclass(kw_only=True)
class Observed:
    """Times are means of an update, without evaluations."""

    updates: int = 0
    """Timed updates."""
    step_s: float = 0.0
    feeding_s: float = 0.0
    """Waiting for batches."""
    feeding_at: str = ""
    """The line of the user that loads samples in this process."""
    loader_at: str = ""
    """The line that makes the loader."""
    total_updates: int | None = None
    """Of the training; None if unknown."""
    epoch_updates: int | None = None
    first_epoch: list[str] = field(default_factory=list)
    """What was unlike the first updates, a line each."""
    slower_s: float = 0.0
    """Seconds by which that epoch was longer."""
    evaluation: EvaluationSeen | None = None
    own: list[LineCost] = field(default_factory=list)
    """Lines that take time and compute nothing with torch."""
    copies: list[LineCost] = field(default_factory=list)
    """Copies of tensors that neither the copy nor the original needed."""
    waits: list[LineCost] = field(default_factory=list)
    """Lines that wait for the GPU."""
    retained: list[LineCost] = field(default_factory=list)
    """Backward passes that keep their graph."""
    wide: Pair | None = None
    """The model's passes in float64, and in float32."""
    wide_updates: Pair | None = None
    """Whole updates in float64, and in float32."""
    on_cpu: Pair | None = None
    """The model's passes on the CPU, and on the GPU."""
    gpus: int = 0
    """GPUs that work, for a training on one."""
    held: list[dict[str, Any]] = field(default_factory=list)
    """The fields of each `GrowingMemory`."""
    graph_steps: int = 0
    """Steps of autograd that stay from each update."""
    graph_holder: str = ""
    """What holds most of them; empty if unknown."""
    rss_an_update: float = 0.0
    """Bytes by which the process grew in a timed update."""
    variables: list[str] = field(default_factory=list)
    """Harmful variables that are set in the process."""
    lost_workers: bool = False
    """Whether workers of its loader died, and ended it."""
    unseen: list[str] = field(default_factory=list)
    """What there was no time to look for."""
    ended: bool = False
    """Whether the script came to its end meanwhile."""
    begun_s: float = 0.0
    """Seconds from the start of the process to the end of the first update."""
    sampler_share: float = 0.0
    """The part of the time that taking samples of its lines cost."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Observed:
        """From the fields as JSON has them."""
        made = dict(values)
        for name in ("own", "copies", "waits", "retained"):
            made[name] = [LineCost(**one) for one in made[name]]
        for name in ("wide", "wide_updates", "on_cpu"):
            made[name] = None if made[name] is None else Pair(**made[name])
        seen = made["evaluation"]
        if seen is not None:
            calls = seen["calls"]
            made["evaluation"] = EvaluationSeen(**{**seen, "calls": None if calls is None else Pair(**calls)})
        return cls(**made)
