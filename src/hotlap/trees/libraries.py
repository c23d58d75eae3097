"""The one place that calls XGBoost and LightGBM: quantised data, boosters, their files, and what really ran.

Features are quantised once for each dataset. Targets share them: a target is a new label on the same data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hotlap.core.errors import MachineError, TrainingError, first_line, library
from hotlap.trees import parameters
from hotlap.trees.data import Array
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


@dataclass(frozen=True, kw_only=True)
class Score:
    """The score of a round on the data to judge it by."""

    metric: str
    value: float
    higher: bool
    """Whether more is better."""


class Held(Protocol):
    """Quantised data in memory. One booster at a time trains on it."""

    def copy(self) -> Held:
        """The same quantised data for another booster beside this one."""

    def begin(self, targets: range, plan: TreePlan) -> Booster:
        """A new booster for these targets."""

    def release(self) -> None:
        """Give back what is shared, once no booster trains on it."""


class Booster(Protocol):
    """A booster in training."""

    def grow(self) -> Score | None:
        """One round, and its score where there is data to judge it by."""

    def enter(self) -> None:
        """Get ready for rounds in this thread, after boosters of other plans have had their turn."""

    def use(self, plan: TreePlan) -> bool:
        """Go on with the threads of another plan; False where only a new booster can."""

    def dump(self, rounds: int) -> bytes:
        """The first rounds in the library's own format."""

    def answers(self, rounds: int, x: Array) -> Array:
        """What the first rounds answer on the CPU."""

    def ran(self) -> dict[str, str]:
        """The parameters that the library reports."""


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


def _objective(job: TreeJob, target: int, *, binary: str, many: str, number: str) -> dict[str, Any]:
    if job.task == "regression":
        return {"objective": number}
    classes = len(job.classes[target])
    return {"objective": binary} if classes == 2 else {"objective": many, "num_class": classes}


class _Lent:
    """What a job's TreeData lend it."""

    def __init__(self, job: TreeJob, plan: TreePlan) -> None:
        self._job, threads = job, plan.threads * plan.at_once
        self.params = job.shared.params if job.shared else {}
        self.train = job.shared.lend(threads, weighted=job.weight is not None) if job.shared else None
        self.valid = job.shared_valid.lend(threads, weighted=False) if job.shared_valid else None

    def give_back(self) -> None:
        """Keep the rows for the next job, unless they have weights."""
        if self._job.shared is not None and self._job.weight is None:
            self._job.shared.give_back(self.train)
        if self._job.shared_valid is not None:
            self._job.shared_valid.give_back(self.valid)


# --- XGBoost -------------------------------------------------------------------------------------------


class XgboostData:
    """A QuantileDMatrix, and another one by the same cuts to judge rounds by."""

    def __init__(self, job: TreeJob, plan: TreePlan, like: XgboostData | None = None) -> None:
        self.xgb = library("xgboost", NEEDS, EXTRA)
        self.job, self._plan, self._lent = job, plan, _Lent(job, plan)
        self.settings = {**parameters.without_device(job.params), **self._lent.params}
        self.train: Any = self._lent.train
        if self.train is None:
            self.train = self._matrix(job.x, job.weight, like.train if like else None)
        elif job.weight is not None:
            self.train.set_weight(job.weight)
        self.valid: Any = self._lent.valid
        if self.valid is None and job.valid is not None:
            self.valid = self._matrix(job.valid[0], None, self.train)

    def copy(self) -> XgboostData:
        """The same cuts; the rows are put into them anew, which takes a third of finding the cuts."""
        with library_errors("xgboost"):
            return XgboostData(self.job, self._plan, like=self)

    def release(self) -> None:
        """Give back what is shared."""
        self._lent.give_back()

    def begin(self, targets: range, plan: TreePlan) -> XgboostBooster:
        """A new booster; the data gets the labels of its targets."""
        with library_errors("xgboost"):
            for matrix, y in ((self.train, self.job.y), (self.valid, self.job.valid and self.job.valid[1])):
                if matrix is not None:
                    matrix.set_label(_columns(y, targets))
            return XgboostBooster(self, targets, plan)

    def _matrix(self, x: Array, weight: Array | None, ref: Any) -> Any:
        settings: dict[str, Any] = {"weight": weight, "nthread": self._plan.threads * self._plan.at_once}
        if self.job.params.get("tree_method") in ("exact", "approx"):  # which do without quantised data
            return self.xgb.DMatrix(x, **settings)
        bins = self.settings.get("max_bin")
        return self.xgb.QuantileDMatrix(x, **settings, ref=ref, max_bin=None if bins is None else int(bins))


class XgboostBooster:
    """A booster of XGBoost, one round at a time."""

    def __init__(self, data: XgboostData, targets: range, plan: TreePlan) -> None:
        job = data.job
        settings = {
            **_objective(job, targets[0], binary="binary:logistic", many="multi:softprob", number="reg:squarederror"),
            **data.settings,
            "seed": int(job.seed),
            "verbosity": 0,
            "nthread": plan.threads,
            "device": plan.device,
        }
        self._data, self._rounds = data, 0
        self._booster = data.xgb.Booster(settings, [m for m in (data.train, data.valid) if m is not None])

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

    def enter(self) -> None:
        """Each booster of XGBoost has its own threads."""

    def use(self, plan: TreePlan) -> bool:
        """Other threads take effect at once."""
        self._booster.set_param({"nthread": plan.threads})
        return True

    def answers(self, rounds: int, x: Array) -> Array:
        """What the first rounds answer on the CPU."""
        booster = self._data.xgb.Booster({"verbosity": 0})
        booster.load_model(bytearray(self.dump(rounds)))
        found: Array = booster.inplace_predict(x)
        return found

    def dump(self, rounds: int) -> bytes:
        """JSON of the first rounds."""
        kept = self._booster if rounds == self._rounds else self._booster[:rounds]
        return bytes(kept.save_raw("json"))

    def ran(self) -> dict[str, str]:
        """What `save_config` says."""
        return parameters.xgboost_ran(self._booster.save_config())


# --- LightGBM ------------------------------------------------------------------------------------------


class LightgbmData:
    """A Dataset, and another one by the same bins to judge rounds by."""

    def __init__(self, job: TreeJob, plan: TreePlan, like: LightgbmData | None = None) -> None:
        self.lgb = library("lightgbm", NEEDS, EXTRA)
        self.job, self._plan, self._lent = job, plan, _Lent(job, plan)
        self.settings = {
            **parameters.without_device(job.params),
            **self._lent.params,
            "device_type": plan.device,
            "seed": int(job.seed),
            "verbosity": -1,
        }
        more = {**self.settings, "num_threads": plan.threads * plan.at_once}
        self.train: Any = self._lent.train
        if self.train is not None:
            self.train.set_weight(job.weight)
        elif like is not None:
            self.train = like.train.subset(range(len(job.x))).construct()
        else:
            y = _columns(job.y, range(1))
            self.train = self.lgb.Dataset(job.x, label=y, weight=job.weight, params=more).construct()
        self.valid: Any = self._lent.valid
        if self.valid is None and job.valid is not None:
            if like is not None:
                self.valid = like.valid.subset(range(len(job.valid[0]))).construct()
            else:
                y = _columns(job.valid[1], range(1))
                self.valid = self.train.create_valid(job.valid[0], label=y, params=more).construct()

    def copy(self) -> LightgbmData:
        """The same bins, copied."""
        with library_errors("lightgbm"):
            return LightgbmData(self.job, self._plan, like=self)

    def release(self) -> None:
        """Give back what is shared."""
        self._lent.give_back()

    def begin(self, targets: range, plan: TreePlan) -> LightgbmBooster:
        """A new booster; the data gets the labels of its target."""
        with library_errors("lightgbm"):
            self.train.set_label(_columns(self.job.y, targets))
            if self.valid is not None:
                self.valid.set_label(_columns(self.job.valid[1], targets))
            return LightgbmBooster(self, targets, plan)


class LightgbmBooster:
    """A booster of LightGBM, one round at a time."""

    def __init__(self, data: LightgbmData, targets: range, plan: TreePlan) -> None:
        settings = {
            **_objective(data.job, targets[0], binary="binary", many="multiclass", number="regression"),
            **data.settings,
            "num_threads": plan.threads,
        }
        self._lgb, self._threads, self._judged = data.lgb, plan.threads, data.valid is not None
        self._booster = data.lgb.Booster(settings, data.train)
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
        self._lgb.Dataset(np.zeros((2, 1)), params=settings).construct()

    def use(self, plan: TreePlan) -> bool:
        """Histograms by row are laid out for the threads that a booster began with."""
        return False

    def answers(self, rounds: int, x: Array) -> Array:
        """What the first rounds answer."""
        return np.asarray(self._booster.predict(x, num_iteration=rounds))

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
