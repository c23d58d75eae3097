"""The one place that calls XGBoost and LightGBM: quantised data, boosters, their files, and what really ran.

Features are quantised once for each dataset. Targets share them: a target is a new label on the same data.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotlap.core.errors import MachineError, TrainingError, first_line, library
from hotlap.trees import parameters
from hotlap.trees.data import Array
from hotlap.trees.files import TreeFiles
from hotlap.trees.job import TreeJob, TreePlan
from hotlap.trees.parameters import EXTRA, NEEDS

_HIGHER = re.compile(r"(auc|aucpr|map|ndcg|pre|average_precision)([@-].*)?")
"""Metrics of which more is better, with what may follow their names, as in `ndcg@5`; `mape` is none of them."""


def more_is_better(metric: str) -> bool:
    """Whether more of a metric of XGBoost or LightGBM is better."""
    return _HIGHER.fullmatch(metric) is not None


_SAMPLING = (
    "subsample", "colsample_bytree", "colsample_bylevel", "colsample_bynode", "sampling_method", "booster",
    "multi_strategy", "objective", "num_parallel_tree", "base_score", "tree_method",
)  # fmt: skip
"""Parameters of XGBoost under which one booster with many targets may grow other trees than a booster for each."""
_DRAWING = (*_SAMPLING[:6], "num_parallel_tree", "tree_method", "process_type", "updater")
"""Parameters of XGBoost under which a booster that was saved may go on to other trees."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """The score of a round on the data to judge it by."""

    metric: str
    value: float
    higher: bool
    """Whether more is better."""


class Held(ABC):
    """Quantised data in memory. One booster at a time trains on it."""

    def __init__(self, job: TreeJob, plan: TreePlan, like: Any = None) -> None:
        """`like` is of the same job: its bins are taken, not found anew."""
        self.library = library(job.library, NEEDS, EXTRA)
        self.job, self.plan, self.threads = job, plan, plan.threads * plan.at_once
        shared, shared_valid = job.shared, job.shared_valid
        self.settings = {**parameters.without_device(job.params), **(shared.params if shared else {})}
        if shared is None:
            self.train = self._quantised(job.x, job.y, job.weight, like and like.train, None)
        else:
            self.train = shared.lend(self.threads, weighted=job.weight is not None)
            if job.weight is not None:
                self.train.set_weight(job.weight)
        self.valid: Any = None
        """To judge rounds by, in the bins of `train`; None where there is none."""
        if shared_valid is not None:
            self.valid = shared_valid.lend(self.threads, weighted=False)
        elif job.valid is not None:
            x, y = job.valid
            self.valid = self._quantised(x, y, None, like and like.valid, self.train)

    def copy(self) -> Held:
        """The same quantised data for another booster beside this one."""
        with library_errors(self.job.library):
            return type(self)(self.job, self.plan, self)

    def begin(self, targets: range, plan: TreePlan) -> Booster:
        """A new booster; the data gets the labels of its targets."""
        with library_errors(self.job.library):
            self.train.set_label(_columns(self.job.y, targets))
            if self.valid is not None:
                self.valid.set_label(_columns(self.job.valid[1], targets))
            return self._booster(targets, plan)

    def release(self) -> None:
        """Give back what is shared, once no booster trains on it; rows with weights are of no use to others."""
        if self.job.shared is not None and self.job.weight is None:
            self.job.shared.give_back(self.train)
        if self.job.shared_valid is not None:
            self.job.shared_valid.give_back(self.valid)

    @abstractmethod
    def _quantised(self, x: Any, y: Array, weight: Array | None, like: Any, bins: Any) -> Any:
        """Features in the library's form: a copy of `like`, or in the bins of other data, or in bins of their own."""

    @abstractmethod
    def _booster(self, targets: range, plan: TreePlan) -> Booster:
        """A booster on this data."""


class Booster(ABC):
    """A booster in training."""

    @abstractmethod
    def grow(self) -> Score | None:
        """One round, and its score where there is data to judge it by."""

    @abstractmethod
    def dump(self, rounds: int) -> bytes:
        """The first rounds in the library's own format."""

    @abstractmethod
    def ran(self) -> dict[str, str]:
        """The parameters that the library reports."""

    def enter(self) -> None:  # noqa: B027 - each booster of XGBoost has its own threads
        """Get ready for rounds in this thread, after boosters of other plans have had their turn."""

    def use(self, plan: TreePlan) -> bool:
        """Go on with the threads of another plan; False where only a new booster can."""
        return False

    @property
    def can_go_on(self) -> bool:
        """Whether `go_on` from what `dump` gave leads to the same trees."""
        return False

    def go_on(self, content: bytes, rounds: int) -> None:
        """Take the place of a booster that has grown for so many rounds."""
        raise NotImplementedError


@contextmanager
def library_errors(name: str) -> Iterator[None]:
    """Raise an error of the library as a TrainingError with its first line, or MachineError if it lacks a device."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] != name:
            raise
        line = first_line(error)
        if any(word in line for word in ("not enabled in this build", "OpenCL", "cuda", "CUDA")):
            raise MachineError(f"{name} cannot train on the GPU: {line}") from error
        raise TrainingError(f"{name}: {line}") from error


def hold(job: TreeJob, plan: TreePlan) -> Held:
    """Quantise the data of a job."""
    with library_errors(job.library):
        return XgboostData(job, plan) if job.library == "xgboost" else LightgbmData(job, plan)


def can_join(job: TreeJob) -> bool:
    """Whether one booster with all targets grows the very trees of a booster for each."""
    return (
        job.library == "xgboost"
        and job.targets > 1
        and job.task == "regression"
        and job.valid is None  # it would stop all targets at once, and score them as one
        and not set(job.params) & set(_SAMPLING)
    )


def check_obeyed(job: TreeJob, plan: TreePlan, ran: dict[str, str]) -> None:
    """Raise MachineError if the library trains elsewhere than asked, and TrainingError for any other difference."""
    device = ran.get("device", ran.get("device_type", "cpu"))
    if device.partition(":")[0] != plan.device.partition(":")[0]:
        raise MachineError(f"device={plan.device!r} was asked for and {job.library} trains on {device!r}")
    wrong = parameters.not_obeyed(job.library, job.params, ran)
    if wrong:
        raise TrainingError("; ".join(wrong))


_OBJECTIVES = {
    "xgboost": ("reg:squarederror", "binary:logistic", "multi:softprob"),
    "lightgbm": ("regression", "binary", "multiclass"),
}
"""Of numbers, of two classes, and of more."""


def _objective(job: TreeJob, target: int) -> dict[str, Any]:
    number, binary, many = _OBJECTIVES[job.library]
    if job.task == "regression":
        return {"objective": number}
    classes = len(job.classes[target])
    return {"objective": binary} if classes == 2 else {"objective": many, "num_class": classes}


# --- XGBoost -------------------------------------------------------------------------------------------


class XgboostData(Held):
    """A QuantileDMatrix, and another one by the same cuts to judge rounds by.

    A copy has the same cuts; the rows are put into them anew, which takes a third of finding the cuts.
    """

    def _quantised(self, x: Any, y: Array, weight: Array | None, like: Any, bins: Any) -> Any:
        settings: dict[str, Any] = {"weight": weight, "nthread": self.threads}
        if self.job.params.get("tree_method") in ("exact", "approx"):  # which do without quantised data
            return self.library.DMatrix(x, **settings)
        most, ref = self.settings.get("max_bin"), like if bins is None else bins
        settings["max_bin"] = None if most is None else int(most)
        if isinstance(x, TreeFiles):
            return x.quantised(settings.pop("weight"), ref, settings)
        return self.library.QuantileDMatrix(x, **settings, ref=ref)

    def _booster(self, targets: range, plan: TreePlan) -> Booster:
        return XgboostBooster(self, targets, plan)


class XgboostBooster(Booster):
    """A booster of XGBoost, one round at a time."""

    def __init__(self, data: Held, targets: range, plan: TreePlan) -> None:
        own = {"seed": int(data.job.seed), "verbosity": 0, "nthread": plan.threads, "device": plan.device}
        self._settings = settings = {**_objective(data.job, targets[0]), **data.settings, **own}
        self._data, self._rounds = data, 0
        self._booster = data.library.Booster(settings, [m for m in (data.train, data.valid) if m is not None])

    def grow(self) -> Score | None:
        """One round."""
        with library_errors("xgboost"):
            self._booster.update(self._data.train, self._rounds)
            self._rounds += 1
            if self._data.valid is None:
                return None
            # "[0]\tv-rmse:0.25", of several metrics the last one
            text = self._booster.eval_set([(self._data.valid, "v")], self._rounds).rsplit("\t", 1)[1]
        name, value = text.removeprefix("v-").rsplit(":", 1)
        return Score(metric=name, value=float(value), higher=more_is_better(name))

    def use(self, plan: TreePlan) -> bool:
        """Other threads take effect at once."""
        self._booster.set_param({"nthread": plan.threads})
        return True

    @property
    def can_go_on(self) -> bool:
        """It can on a CPU, where nothing is drawn: a file does not hold the state of the generator."""
        drawn = set(self._data.job.params) & set(_DRAWING) or str(self._settings["objective"]).startswith("rank")
        return self._settings["device"] == "cpu" and not drawn

    def go_on(self, content: bytes, rounds: int) -> None:
        """Load the trees; the parameters are those that it began with."""
        with library_errors("xgboost"):
            self._booster.load_model(bytearray(content))
            self._booster.set_param(self._settings)
        self._rounds = rounds

    def dump(self, rounds: int) -> bytes:
        """JSON of the first rounds."""
        kept = self._booster if rounds == self._rounds else self._booster[:rounds]
        return bytes(kept.save_raw("json"))

    def ran(self) -> dict[str, str]:
        """What `save_config` says."""
        return parameters.xgboost_ran(self._booster.save_config())


def answers_on_cpu(content: bytes, x: Array) -> Array:
    """What a dumped booster of XGBoost answers on the CPU."""
    booster = library("xgboost", NEEDS, EXTRA).Booster({"verbosity": 0})
    booster.load_model(bytearray(content))
    return np.asarray(booster.inplace_predict(x), dtype=np.float64)


# --- LightGBM ------------------------------------------------------------------------------------------


class LightgbmData(Held):
    """A Dataset, and another one by the same bins to judge rounds by; both are copied with their bins."""

    def __init__(self, job: TreeJob, plan: TreePlan, like: Any = None) -> None:
        self._own = {"device_type": plan.device, "seed": int(job.seed), "verbosity": -1}
        super().__init__(job, plan, like)
        self.settings |= self._own

    def _quantised(self, x: Any, y: Array, weight: Array | None, like: Any, bins: Any) -> Any:
        if like is not None:
            return like.subset(range(len(x))).construct()
        params = {**self.settings, **self._own, "num_threads": self.threads}
        label = _columns(y, range(1))
        return self.library.Dataset(x, label=label, weight=weight, reference=bins, params=params).construct()

    def _booster(self, targets: range, plan: TreePlan) -> Booster:
        return LightgbmBooster(self, targets, plan)


class LightgbmBooster(Booster):
    """A booster of LightGBM, one round at a time; its histograms are laid out for the threads that it begins with."""

    def __init__(self, data: Held, targets: range, plan: TreePlan) -> None:
        settings = {**_objective(data.job, targets[0]), **data.settings, "num_threads": plan.threads}
        self._library, self._threads, self._judged = data.library, plan.threads, data.valid is not None
        self._booster = data.library.Booster(settings, data.train)
        if self._judged:
            self._booster.add_valid(data.valid, "v")

    def grow(self) -> Score | None:
        """One round; a round that finds no split adds a tree of one leaf."""
        with library_errors("lightgbm"):
            self._booster.update()
            if not self._judged:
                return None
            _, name, value, higher = self._booster.eval_valid()[0]
        return Score(metric=name, value=float(value), higher=bool(higher))

    def enter(self) -> None:
        """Threads are one setting for all boosters of LightGBM in a process, and how much it prints one for a thread.

        Both are set by whatever is made last: here a dataset of two rows, in 0.1 ms.
        """
        settings = {"num_threads": self._threads, "verbosity": -1}
        self._library.Dataset(np.zeros((2, 1)), params=settings).construct()

    def dump(self, rounds: int) -> bytes:
        """Text of the first rounds."""
        text: str = self._booster.model_to_string(num_iteration=rounds)
        return text.encode()

    def ran(self) -> dict[str, str]:
        """What the text of the booster says."""
        return parameters.lightgbm_ran(self._booster.model_to_string(num_iteration=1))


def _columns(y: Array, targets: range) -> Array:
    """The targets as the libraries take them: one as a vector."""
    return np.ascontiguousarray(y[:, targets[0]] if len(targets) == 1 else y[:, targets.start : targets.stop])
