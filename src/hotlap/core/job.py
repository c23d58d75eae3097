"""A Job says what is to be trained: model, data, loss, optimizer, how long, and how it is judged."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from hotlap.core.data_checks import is_columns as is_columns
from hotlap.core.data_checks import named_columns as named_columns
from hotlap.core.errors import JobError, did_you_mean
from hotlap.core.job_checks import METRICS as METRICS
from hotlap.core.job_checks import REQUIRED, Problems

WHOLE = (
    "batch_size", "epochs", "steps", "accumulate", "eval_batch", "eval_every", "patience", "seed", "skip_bad_samples",
)  # fmt: skip
"""Fields that are whole numbers."""


# Compared by identity: two jobs hold models and tensors, which have no equality of yes or no.
@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """What is to be trained. Raises JobError with all mistakes at once."""

    model: nn.Module = REQUIRED
    """The module to train, with at least one parameter that requires gradients."""
    data: Any = REQUIRED
    """Training data: a tuple or dict of tensors or arrays, a Dataset, a DataLoader, or anything indexable."""
    loss: Callable[..., Any] = REQUIRED
    """A loss module of (output, target), or `f(model, batch)`.

    Returns a mean over samples, or (sum, count) if it averages over anything else, such as tokens.
    """
    optimizer: Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer] = REQUIRED
    """An optimizer, or a function that makes one from the parameters of the model (and of the loss, if it has any)."""
    batch_size: int | None = None
    """Samples per batch; a DataLoader brings its own."""
    epochs: int | None = None
    """Epochs over the data. Give either epochs or steps."""
    steps: int | None = None
    """Optimizer steps, skipped ones included. Give either epochs or steps."""

    order: Literal["shuffled", "as given"] | Iterable[Any] | None = None
    """`shuffled` (default), `as given`, or a sampler with a length; a DataLoader brings its own.

    Random orders come from `seed` and the epoch, not from the generator of the process or the loader.
    """
    reorder: bool = False
    """Allow batches of samples of similar length, from shuffled windows; `data` has to be Sequences."""
    drop_last: bool | None = None
    """Leave out the last, shorter batch of an epoch; a DataLoader brings its own."""
    collate: Callable[[list[Any]], Any] | None = None
    """Makes a batch of samples; a DataLoader brings its own."""
    forward: Callable[[nn.Module, Any], tuple[Any, Any]] | None = None
    """`f(model, batch) -> (output, target)`. Default: all of a tuple but its last entry go into the model."""
    prepare: Callable[[Any], Any] | None = None
    """`f(batch) -> batch`, run on the device on every batch, in training and evaluation; for example normalising."""
    augment: Callable[[Any], Any] | None = None
    """`f(batch) -> batch`, run on the device after `prepare`, in training only. Draws from torch's generator."""

    schedule: LRScheduler | ReduceLROnPlateau | Callable[..., Any] | None = None
    """A learning-rate schedule, or a function that makes one from (optimizer) or (optimizer, updates or epochs)."""
    schedule_per: Literal["update", "epoch"] = "update"
    """When the schedule moves: every real `update`, or every `epoch`. A plateau moves at each evaluation."""
    clip: float | None = None
    """Largest norm of all gradients together: of the model, the loss, and whatever else the optimizer holds."""
    accumulate: int = 1
    """Batches that make one update: the effective batch is batch_size × accumulate."""
    skip_nonfinite: bool = False
    """Leave out an update whose gradients hold NaN or Inf. On a GPU this costs one wait per step."""

    skip_bad_samples: int = 0
    """How many samples may be left out because fetching them raises, of `data` and `valid` together; 0: none.

    A sample is left out of its batch, which counts with its true size. The run lists each.
    """

    valid: Any = None
    """Validation data, in any form that `data` may have."""
    metrics: Sequence[str] | Mapping[str, Any] = ()
    """Names, or name → `f(output, target)` that returns a value per sample, a mean, or (sum, count)."""
    eval_batch: int | None = None
    """Samples per batch in evaluation. Default: four training batches."""
    eval_every: int | None = None
    """Updates between evaluations. Default: one at the end of every epoch."""
    monitor: str = "loss"
    """What decides which weights are best: `loss` or a metric, on the validation data."""
    better: Literal["lower", "higher"] | None = None
    """Whether `lower` or `higher` is better; known for the loss and for metrics with a name."""
    patience: int | None = None
    """Evaluations without improvement before training stops; the best weights are restored at the end."""

    seed: int = 0
    """Decides data order, augmentation and the randomness of the training."""
    device: str = "auto"
    """`auto` (a GPU that works, else the CPU), `cpu`, `cuda`, or `cuda:N`."""

    LOADER_BRINGS: ClassVar[tuple[str, ...]] = ("batch_size", "order", "drop_last", "collate")

    def __post_init__(self) -> None:
        problems = Problems(self).found
        if problems:
            raise JobError(problems)
        for name in WHOLE:
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, int(value))  # numpy's whole numbers are no int to JSON

    @property
    def effective_batch(self) -> int | None:
        """Samples per update, or None where a batch sampler decides it."""
        size = self.data.batch_size if isinstance(self.data, DataLoader) else self.batch_size
        return None if size is None else size * self.accumulate

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The names of all metrics."""
        return tuple(self.metrics)

    @property
    def higher_is_better(self) -> bool:
        """Which way `monitor` should move."""
        return (self.better or METRICS.get(self.monitor, "lower")) == "higher"


def _reporting_unknown(init: Callable[..., None]) -> Callable[..., None]:
    """Report a misspelt field beside all other mistakes, where Python would stop at the name."""
    known = [f.name for f in fields(Job)]

    @functools.wraps(init)
    def wrapper(self: Job, *args: Any, **given: Any) -> None:
        unknown = [name for name in given if name not in known]
        problems = [f"Job has no field {name!r}{did_you_mean(name, known)}" for name in unknown]
        if args:
            problems.append(f"Job takes fields by name only, e.g. Job(model=…); {len(args)} came without a name")
        try:
            init(self, **{name: value for name, value in given.items() if name in known})
        except JobError as error:
            problems += error.problems
        if problems:
            raise JobError(problems)

    return wrapper


setattr(Job, "__init__", _reporting_unknown(Job.__init__))  # noqa: B010 -- mypy refuses the plain assignment
