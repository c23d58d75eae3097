"""Checks of a job: every mistake in it, one line each."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from numbers import Integral
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, default_collate

from hotlap.core.data_checks import data_problems, double_problems
from hotlap.core.errors import did_you_mean, kind_of, shown

METRICS = {"accuracy": "higher", "macro_f1": "higher", "mae": "lower", "rmse": "lower"}
"""Metrics known by name, and which direction is better."""

ORDERS = ("shuffled", "as given")

MOST = 2**31 - 1
"""Of samples, updates, epochs: what no training comes to."""

RECORDED = ("loss", "step", "epoch", "samples", "train_loss", "valid_loss", "lr", "elapsed_s")
"""What a run records beside the metrics, which therefore need other names."""


class _Missing:
    def __repr__(self) -> str:
        return "(required)"


REQUIRED: Any = _Missing()


class Problems:
    """All that is wrong with a job, one line each."""

    def __init__(self, job: Any) -> None:
        self.job = job  # whatever the types promise, a user may bring anything
        self.found: list[str] = []
        missing = [f.name for f in fields(job) if getattr(job, f.name) is REQUIRED]
        self.found += [f"{name} is missing" for name in missing]
        self.missing = set(missing)
        self._numbers()
        self._model_and_loss()
        self._optimizer()
        self._schedule()
        self._data()
        self._judging()

    def _add(self, problem: str) -> None:
        self.found.append(problem)

    def _numbers(self) -> None:
        job = self.job
        for name in ("batch_size", "epochs", "steps", "accumulate", "eval_batch", "eval_every", "patience"):
            value = getattr(job, name)
            if value is None and name != "accumulate":
                continue
            if not is_whole(value) or value < 1:
                self._add(f"{name}={shown(value)} must be a whole number of at least 1")
            elif value > MOST:
                self._add(f"{name}={shown(value)} is too large; the most is {MOST:,}")
        if not is_whole(job.seed) or not 0 <= job.seed < 2**63:
            self._add(f"seed={shown(job.seed)} must be a whole number from 0 to 2**63 - 1")
        if not is_whole(job.skip_bad_samples) or not 0 <= job.skip_bad_samples <= MOST:
            self._add(
                f"skip_bad_samples={shown(job.skip_bad_samples)} must be the number of samples that may be left out, "
                "a whole number of at least 0"
            )
        clip = job.clip
        if clip is not None and not ((is_whole(clip) or isinstance(clip, float)) and 0 < clip < float("inf")):
            self._add(f"clip={shown(clip)} must be a number above 0")
        if job.epochs is None and job.steps is None:
            self._add("neither epochs nor steps is given; say how long to train, e.g. epochs=10")
        if job.epochs is not None and job.steps is not None:
            self._add(f"both epochs={shown(job.epochs)} and steps={shown(job.steps)} are given; give one")
        for name, known in (("schedule_per", ("update", "epoch")), ("better", ("lower", "higher"))):
            value = getattr(job, name)
            if not (isinstance(value, str) and value in known) and not (name == "better" and value is None):
                self._add(f"{name}={shown(value)} is not known{did_you_mean(value, known)}")
        if not _is_device(job.device):
            self._add(f"device={shown(job.device)} is none of 'auto', 'cpu', 'cuda', 'cuda:N'")

    def _model_and_loss(self) -> None:
        model, loss = self.job.model, self.job.loss
        if "model" not in self.missing:
            if not isinstance(model, nn.Module):
                hint = "; create it first: model()" if isinstance(model, type) else ""
                self._add(f"model must be a torch.nn.Module, not {kind_of(model)}{hint}")
            elif any(isinstance(p, UninitializedParameter) for p in model.parameters()):
                self._add("model has lazy layers without shapes yet; run one batch through it first")
            elif not any(p.requires_grad for p in model.parameters()):
                self._add("model has no parameter that requires a gradient: there is nothing to train")
            elif any(p.is_inference() for p in model.parameters()):
                self._add("model was made inside torch.inference_mode() and cannot be trained; make it outside")
        if "loss" in self.missing:
            return
        if isinstance(loss, type):
            self._add(f"loss is the class {loss.__name__}; did you mean {loss.__name__}()?")
        elif not callable(loss):
            self._add(f"loss must be a loss module or f(model, batch), not {kind_of(loss)}")
        elif getattr(_unwrapped(loss), "__module__", "") == "torch.nn.functional":
            self._add(
                f"loss is torch.nn.functional.{_unwrapped(loss).__name__}, a function of (output, target); "
                "did you mean the loss module of torch.nn, e.g. nn.CrossEntropyLoss()?"
            )
        # A loss of the user's own may use the word for what it averages itself.
        elif type(loss).__module__.startswith("torch.") and getattr(loss, "reduction", None) == "none":
            self._add("loss has reduction='none', which gives no single number; use 'mean' or 'sum'")
        elif not isinstance(loss, nn.Module) and not _takes(loss, 2):
            self._add("loss must take (model, batch), or be a loss module of (output, target)")

    def _optimizer(self) -> None:
        if "optimizer" in self.missing:
            return
        optimizer, model = self.job.optimizer, self.job.model
        kind = _unwrapped(optimizer) if isinstance(_unwrapped(optimizer), type) else type(optimizer)
        if issubclass(kind, Optimizer) and _needs_closure(kind):
            self._add(
                f"optimizer is {kind.__name__}, which evaluates the loss several times an update (a closure); "
                "use one that steps once, e.g. torch.optim.AdamW"
            )
        if isinstance(optimizer, Optimizer):
            if isinstance(model, nn.Module):
                mine = {id(p) for p in model.parameters()}
                held = {id(p) for group in optimizer.param_groups for p in group["params"]}
                if not mine & held:
                    self._add("optimizer holds no parameter of this model; it was made for another one")
        elif isinstance(optimizer, str):
            self._add(
                f"optimizer={shown(optimizer)} is a word; give e.g. torch.optim.AdamW(model.parameters(), lr=1e-3)"
            )
        elif not callable(optimizer):
            self._add(f"optimizer must be a torch optimizer or a function of the parameters, not {kind_of(optimizer)}")
        elif not _takes(optimizer, 1):
            self._add("optimizer is a function that cannot be called with the parameters alone; give lambda params: …")

    def _schedule(self) -> None:
        schedule = self.job.schedule
        if schedule is None:
            return
        if isinstance(schedule, type):
            self._add(
                f"schedule is the class {schedule.__name__}; give a function that makes it: "
                f"schedule=lambda optimizer, updates: {schedule.__name__}(optimizer, …)"
            )
            return
        if isinstance(schedule, ReduceLROnPlateau):
            self.found += plateau_problems(schedule, self.job)
        if isinstance(schedule, (LRScheduler, ReduceLROnPlateau)):
            if isinstance(self.job.optimizer, Optimizer):
                if schedule.optimizer is not self.job.optimizer:
                    self._add("schedule belongs to another optimizer than the job's")
            elif callable(self.job.optimizer):
                self._add(
                    "schedule is made already while optimizer is a function; give both made, or both as functions"
                )
        elif not callable(schedule):
            self._add(f"schedule must be a scheduler or a function of the optimizer, not {kind_of(schedule)}")
        elif not _takes(schedule, 1) and not _takes(schedule, 2):
            self._add("schedule is a function that takes neither (optimizer) nor (optimizer, updates)")

    def _data(self) -> None:
        job = self.job
        if "data" not in self.missing:
            self._one_data("data", job.data)
            if isinstance(job.data, DataLoader):
                brings = {"batch_size": job.data.batch_size, "drop_last": job.data.drop_last}
                for name in job.LOADER_BRINGS:
                    mine, its = shown(getattr(job, name)), f" ({shown(brings[name])})" if name in brings else ""
                    if getattr(job, name) is not None:
                        self._add(
                            f"{name} is given both by the job ({mine}) and by the DataLoader in data{its}; "
                            "leave it to one"
                        )
            elif job.batch_size is None:
                self._add("batch_size is missing")
        if job.valid is not None:
            self._one_data("valid", job.valid)
        order = job.order
        if isinstance(order, str):
            if order not in ORDERS:
                self._add(f"order={shown(order)} is not known{did_you_mean(order, ORDERS)}")
        elif order is not None and (
            isinstance(order, type) or not (hasattr(order, "__iter__") and hasattr(order, "__len__"))
        ):
            self._add(f"order must be 'shuffled', 'as given' or a sampler with a length, not {kind_of(order)}")
        if job.reorder is True and not (order is None or order == "shuffled"):
            self._add("reorder=True shuffles by length, and order says otherwise; leave one of the two out")
        for name in ("drop_last", "skip_nonfinite", "reorder"):
            value = getattr(job, name)
            if not isinstance(value, bool) and not (name == "drop_last" and value is None):
                self._add(f"{name}={shown(value)} must be True or False")
        functions = {"collate": "(samples)", "forward": "(model, batch)", "prepare": "(batch)", "augment": "(batch)"}
        for name, takes in functions.items():
            value = getattr(job, name)
            if value is None:
                continue
            if not callable(value):
                self._add(f"{name} must be a function, not {kind_of(value)}")
            elif not _takes(value, takes.count(",") + 1):
                self._add(f"{name} must be a function of {takes}")

    def _one_data(self, name: str, data: Any) -> None:
        job = self.job
        self.found += data_problems(name, data)
        made_by_user = job.forward is not None or job.collate is not None or job.prepare is not None
        if isinstance(data, DataLoader):
            made_by_user = made_by_user or data.collate_fn is not default_collate
        if isinstance(job.loss, nn.Module) and isinstance(job.model, nn.Module) and not made_by_user:
            self.found += double_problems(name, data, job.model)

    def _judging(self) -> None:
        job = self.job
        self.found += metric_problems(job.metrics)
        if isinstance(job.metrics, (Sequence, Mapping)) and not isinstance(job.metrics, str):
            self._monitor()
        for name in ("patience", "eval_every"):
            value = getattr(job, name)
            if value is not None and job.valid is None:
                self._add(f"{name}={shown(value)} needs validation data: give valid=")

    def _monitor(self) -> None:
        job = self.job
        names = ("loss", *(name for name in job.metrics if isinstance(name, str)))
        if not isinstance(job.monitor, str) or job.monitor not in names:
            self._add(
                f"monitor={shown(job.monitor)} is neither the loss nor a metric{did_you_mean(job.monitor, names)}"
            )
        elif job.monitor != "loss" and job.monitor not in METRICS and job.better is None:
            self._add(f"monitor={shown(job.monitor)} is a metric of your own: say better='higher' or better='lower'")
        if job.metrics and job.valid is None:
            self._add("metrics are measured on validation data: give valid=")


def metric_problems(metrics: Any) -> list[str]:
    """What is wrong with the metrics asked for, one line each."""
    if isinstance(metrics, str) or not isinstance(metrics, (Sequence, Mapping)):
        return [f"metrics must be a list of names or a dict of functions, not {kind_of(metrics)}"]
    found = []
    if isinstance(metrics, Mapping):
        for name, metric in metrics.items():
            label = f"metrics[{shown(name)}]"
            if not isinstance(name, str):
                found.append(f"{label} has a name that is no text")
            elif name in RECORDED:
                found.append(f"{label} hides the {name} that a run records; give the metric another name")
            if isinstance(metric, type) or not callable(metric):
                found.append(f"{label} must be a function of (output, target), not {kind_of(metric)}")
        return found
    for name in metrics:
        if callable(name):
            found.append(f"metrics holds {kind_of(name)}; give functions by name: metrics={{'name': function}}")
        elif not isinstance(name, str) or name not in METRICS:
            found.append(f"metrics holds {shown(name)}, which is not known{did_you_mean(name, METRICS)}")
    return found


def plateau_problems(schedule: ReduceLROnPlateau, job: Any) -> list[str]:
    """What keeps a schedule that waits for a plateau from its work, one line each."""
    found = []
    if job.valid is None:
        found.append("schedule is ReduceLROnPlateau, which needs validation data: give valid=")
    higher = (job.better or METRICS.get(job.monitor, "lower")) == "higher"
    wanted = "max" if higher else "min"
    if schedule.mode != wanted:
        found.append(f"schedule waits for mode={schedule.mode!r} while {job.monitor} is watched: give mode={wanted!r}")
    return found


def _needs_closure(kind: type) -> bool:
    try:
        closure = inspect.signature(kind.step).parameters.get("closure")  # type: ignore[attr-defined]
    except ValueError:
        return False
    return closure is not None and closure.default is closure.empty


def is_whole(value: object) -> bool:
    """Whether it is a whole number, numpy's too; bool is an int to Python, and a mistake here."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_device(value: object) -> bool:
    if not isinstance(value, str):
        return False
    return value in ("auto", "cpu", "cuda") or (re.fullmatch(r"cuda:[0-9]{1,3}", value) is not None)


def _unwrapped(function: Any) -> Any:
    """The function inside of `functools.partial`."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Whether `function` can be called with `count` positional arguments; yes if its signature cannot be read."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:
        return True
    return True
