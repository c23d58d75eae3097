"""A TreeJob says which boosters are to be trained; a TreePlan says how, which changes time and never the trees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Self

import numpy as np

from hotlap.core.errors import JobError, PlanError, did_you_mean, first_line, shown
from hotlap.core.plan import MOST_WORKERS
from hotlap.trees import parameters
from hotlap.trees.data import LEAST_ROWS, LIBRARIES, Array, TreeData, features
from hotlap.trees.files import TreeFiles

TASKS = ("regression", "classification")


@dataclass(frozen=True, kw_only=True)
class TreePlan:
    """How boosters are trained."""

    device: str = "cpu"
    """`cpu`, `cuda` or `cuda:N`."""
    threads: int = 1
    """Threads of each booster."""
    at_once: int = 1
    """Boosters in training at the same time."""
    joint: bool = False
    """One booster with a tree for each target in each round, in place of a booster for each target. XGBoost only."""

    def __post_init__(self) -> None:
        wrong = [
            f"{name}={shown(value)} must be a whole number from 1 to {MOST_WORKERS:,}"
            for name, value in (("threads", self.threads), ("at_once", self.at_once))
            if type(value) is not int or not 1 <= value <= MOST_WORKERS
        ]
        if not parameters.is_device(self.device):
            wrong.append(f"device={shown(self.device)} must be cpu, cuda or cuda:N")
        joint: object = self.joint
        if not isinstance(joint, bool):
            wrong.append(f"joint={shown(self.joint)} must be true or false")
        if wrong:
            raise PlanError(*wrong)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], base: TreePlan | None = None) -> Self:
        """The plan `base` with these choices changed. Raises PlanError with all mistakes."""
        known = [f.name for f in fields(cls)]
        unknown = [f"a plan of trees has no choice {shown(n)}{did_you_mean(n, known)}" for n in raw if n not in known]
        if unknown:
            raise PlanError(*unknown)
        return cls(**{**asdict(base or cls()), **raw})

    def __str__(self) -> str:
        boosters = "one booster for all targets" if self.joint else f"{self.at_once} at once"
        return f"{self.device} · {self.threads} thread{'s' if self.threads > 1 else ''} a booster · {boosters}"


@dataclass(frozen=True, eq=False)
class TreeJob:
    """What is to be trained. Raises JobError with all mistakes at once.

    With several columns in `y`, each is a target with trees of its own.
    """

    x: Any
    """Features: rows × columns of numbers, as an array, anything that numpy makes one of, TreeData, or TreeFiles where
    they are larger than memory. NaN is a missing value."""
    y: Any
    """Targets: a value a row, or rows × targets. In classification labels of any kind."""
    valid: Any = field(default=None, kw_only=True)
    """`(x, y)` to judge each round by."""
    weight: Any = field(default=None, kw_only=True)
    """A weight for each row, of 0 or more."""
    library: Literal["xgboost", "lightgbm"] = field(default="xgboost", kw_only=True)
    task: Literal["regression", "classification"] = field(default="regression", kw_only=True)
    params: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """Parameters of the library, by its names."""
    rounds: int = field(default=100, kw_only=True)
    """Trees for each target (and class)."""
    patience: int | None = field(default=None, kw_only=True)
    """Rounds without a better score on `valid` after which a target stops; it keeps the trees up to the best round."""
    seed: int = field(default=0, kw_only=True)
    classes: tuple[tuple[Any, ...], ...] = field(default=(), init=False)
    """Labels of each target, sorted; empty in regression."""
    shared: TreeData | None = field(default=None, init=False)
    """The features as TreeData, where they are."""
    shared_valid: TreeData | None = field(default=None, init=False)
    """The features of `valid` as TreeData, where they are."""

    def __post_init__(self) -> None:
        wrong = [*_settings(self)]
        if not wrong:
            wrong += parameters.problems(self.library, self.task, self.params)
        wrong += self._take_arrays()
        if wrong:
            raise JobError(wrong)

    @property
    def targets(self) -> int:
        """How many targets there are."""
        return int(self.y.shape[1])

    @property
    def one_target(self) -> bool:
        """Whether answers have one dimension, as `y` had."""
        return bool(self._flat)  # type: ignore[attr-defined]

    def _take_arrays(self) -> list[str]:
        """Replace features, targets and weights by checked arrays; the mistakes found."""
        wrong: list[str] = []
        put = object.__setattr__
        if isinstance(self.x, TreeData):
            put(self, "shared", self.x)
            wrong += self._shared_problems(self.x)
        x, y = features(self.x, "x", wrong), _targets(self.y, "y", self.task, wrong)
        if isinstance(x, TreeFiles):
            wrong += parameters.files_problems(self.library, self.params)
        put(self, "_flat", y is None or y.ndim == 1)
        classes: list[tuple[Any, ...]] = []
        if y is not None:
            y, classes = _coded(y, self.task, wrong)
        if x is not None and y is not None:
            wrong += _sizes(x, y, "x", "y")
        if x is not None and len(x) < LEAST_ROWS:
            wrong.append(f"x has {len(x)} rows; training needs at least {LEAST_ROWS}")
        valid = None if self.valid is None else self._take_valid(x, y, classes, wrong)
        weight = None if self.weight is None else _weights(self.weight, x, wrong)
        params = dict(self.params) if isinstance(self.params, Mapping) else {}
        checked = {"x": x, "y": y, "valid": valid, "weight": weight, "classes": tuple(classes), "params": params}
        for name, value in checked.items():
            put(self, name, value)
        return wrong

    def _shared_problems(self, data: TreeData) -> list[str]:
        if data.library != self.library:
            return [f"x is TreeData of {data.library} and the job is for {shown(self.library)}"]
        return parameters.shared_problems(self.library, self.params) if isinstance(self.params, Mapping) else []

    def _take_valid(self, x: Array | None, y: Array | None, classes: list[tuple[Any, ...]], wrong: list[str]) -> Any:
        if not isinstance(self.valid, (tuple, list)) or len(self.valid) != 2:
            wrong.append(f"valid must be a pair (x, y), not {shown(self.valid)}")
            return None
        if isinstance(self.valid[0], TreeData):
            object.__setattr__(self, "shared_valid", self.valid[0])
            if self.shared is None or self.valid[0].whole is not self.shared.whole:
                wrong.append("valid is of another TreeData than x: take both with rows(…) of one")
        vx = features(self.valid[0], "valid x", wrong)
        vy = _targets(self.valid[1], "valid y", self.task, wrong)
        if vx is not None and x is not None and vx.shape[1] != x.shape[1]:
            wrong.append(f"valid x has {vx.shape[1]} columns and x has {x.shape[1]}")
        if vx is not None and not len(vx):
            wrong.append("valid has no rows; leave it out or give some")
        if vx is None or vy is None or x is None or y is None:
            return None
        flat = vy.reshape(len(vy), -1)
        if flat.shape[1] != y.shape[1]:
            wrong.append(f"valid y has {flat.shape[1]} targets and y has {y.shape[1]}")
            return None
        wrong += _sizes(vx, flat, "valid x", "valid y")
        if self.task == "classification":
            flat = _coded_as(flat, classes, wrong)
        return vx, np.ascontiguousarray(flat, dtype=np.float32)


def _settings(job: TreeJob) -> list[str]:
    wrong = [
        f"{name}={shown(value)} is not known{did_you_mean(value, known)}"
        for name, value, known in (("library", job.library, LIBRARIES), ("task", job.task, TASKS))
        if not isinstance(value, str) or value not in known
    ]
    least = {"rounds": (job.rounds, 1), "seed": (job.seed, 0)}
    if job.patience is not None:
        least["patience"] = (job.patience, 1)
        if job.valid is None:
            wrong.append(f"patience={shown(job.patience)} needs valid=(x, y) to judge the rounds by")
        if isinstance(job.params, Mapping) and "dart" in job.params.values():
            wrong.append(
                "patience keeps the best rounds, and 'dart' changes their trees in later rounds; leave one out"
            )
    wrong += [
        f"{name}={shown(value)} must be a whole number of at least {low}"
        for name, (value, low) in least.items()
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or not low <= value < 2**31
    ]
    params: object = job.params
    if not isinstance(params, Mapping):
        wrong.append(f"params={shown(job.params)} must be a dict of the library's parameters")
    return wrong


def _targets(value: Any, name: str, task: str, wrong: list[str]) -> Array | None:
    array = np.asarray(value)
    if array.ndim not in (1, 2) or (array.ndim == 2 and not array.shape[1]):
        wrong.append(f"{name} has the shape {array.shape}; it must be a value a row, or rows × targets")
        return None
    if task == "classification" and array.dtype.kind not in "fc":
        return array
    try:
        array = array.astype(np.float64)
    except (TypeError, ValueError) as error:
        wrong.append(f"{name} must be numbers: {first_line(error)}")
        return None
    with np.errstate(over="ignore"):
        bad = ~np.isfinite(array.astype(np.float32))  # both libraries keep targets as 32-bit floats
    if bad.any():
        first = np.argwhere(bad)[0]
        place = f"row {first[0]}" + (f", target {first[1]}" if len(first) > 1 else "")
        wrong.append(f"{name} has {int(bad.sum()):,} values that are not finite numbers, the first in {place}; "
                     "leave such rows out")  # fmt: skip
        return None
    return array


def _coded(y: Array, task: str, wrong: list[str]) -> tuple[Array, list[tuple[Any, ...]]]:
    """Targets as rows × targets of float32, and the labels that the numbers stand for."""
    flat = y.reshape(len(y), -1)
    if task != "classification":
        return np.ascontiguousarray(flat, dtype=np.float32), []
    classes: list[tuple[Any, ...]] = []
    coded = np.zeros(flat.shape, np.float32)
    for target in range(flat.shape[1]):
        try:
            labels, codes = np.unique(flat[:, target], return_inverse=True)
        except TypeError:
            wrong.append(f"the labels of target {target} are of several kinds; use one, such as texts")
            continue
        if len(labels) < 2:
            wrong.append(f"target {target} has one label only ({shown(labels.tolist())}); classes need two or more")
        classes.append(tuple(labels.tolist()))
        coded[:, target] = codes
    if not all(isinstance(label, (str, int, float, bool)) for labels in classes for label in labels):
        wrong.append("labels must be texts or numbers")
    return coded, classes


def _coded_as(flat: Array, classes: list[tuple[Any, ...]], wrong: list[str]) -> Array:
    """The labels of `valid` by the numbers that those of `y` have."""
    coded = np.zeros(flat.shape, np.float32)
    for target, labels in enumerate(classes):
        numbers = {label: number for number, label in enumerate(labels)}
        column = flat[:, target].tolist()
        new = sorted({str(label) for label in column if label not in numbers})
        if new:
            wrong.append(f"valid y has labels that y lacks: {shown(new)}")
        coded[:, target] = [numbers.get(label, 0) for label in column]
    return coded


def _weights(value: Any, x: Array | None, wrong: list[str]) -> Array | None:
    try:
        array = np.asarray(value, dtype=np.float32)
    except (TypeError, ValueError):
        wrong.append(f"weight={shown(value)} must be a number for each row")
        return None
    if array.ndim != 1 or (x is not None and len(array) != len(x)):
        wrong.append(f"weight has the shape {array.shape}; it must be one number for each row of x")
    elif not (np.isfinite(array).all() and (array >= 0).all() and array.any()):
        wrong.append("weights must be finite, 0 or more, and not all 0")
    return np.ascontiguousarray(array)


def _sizes(x: Array, y: Array, x_name: str, y_name: str) -> list[str]:
    return [] if len(x) == len(y) else [f"{x_name} has {len(x):,} rows and {y_name} has {len(y):,}"]
