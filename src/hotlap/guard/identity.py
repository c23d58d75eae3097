"""Knowing a training again: fingerprints of its code, data and settings, and how two of them differ."""

from __future__ import annotations

import hashlib
import inspect
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hotlap.core.job import Job
from hotlap.data.course import Course
from hotlap.data.source import Columns
from hotlap.guard.fingerprint import outside_of

MAY_CHANGE = ("epochs", "steps", "patience", "eval_every", "device")
"""Settings that say how long or where, not what: a resumed training may have others."""


def identity(job: Job, course: Course) -> dict[str, Any]:
    """What makes this training this training, as JSON."""
    return {
        "settings": settings_of(job),
        "code": code_of(job),
        "data": data_of(job, course),
        "model": shapes_of(job.model),
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """How two identities differ, one line each; settings that may change are left out."""
    found = []
    for part in ("settings", "code", "data", "model"):
        old, new = before.get(part) or {}, now.get(part) or {}
        for name in sorted({*old, *new}):
            if old.get(name) == new.get(name) or (part == "settings" and name in MAY_CHANGE):
                continue
            if part == "code":
                found.append(f"the code of {name} {'is other' if name in old and name in new else 'is new or gone'}")
            else:
                found.append(f"{part}: {name} was {_short(old.get(name))}, is {_short(new.get(name))}")
    return found


def settings_of(job: Job) -> dict[str, Any]:
    """The job's settings; objects by the name of their class."""
    plain = (int, float, str, bool, type(None))
    settings = {name: v if isinstance(v, plain) else _named(v) for name, v in vars(job).items()}
    if isinstance(job.optimizer, torch.optim.Optimizer):
        settings["optimizer"] = _optimizer(job.optimizer)
    settings["metrics"] = ", ".join(job.metric_names)
    return settings


def code_of(job: Job) -> dict[str, str]:
    """A hash of each source file of the user's that takes part; by class or function where there is no file."""
    parts: list[Any] = [*{type(layer) for layer in job.model.modules()}]
    parts += [job.loss, job.forward, job.collate, job.optimizer, job.schedule]
    if isinstance(job.metrics, Mapping):
        parts += job.metrics.values()
    data = job.data.dataset if isinstance(job.data, DataLoader) else job.data
    if not isinstance(data, (Tensor, tuple, dict, list)):
        parts.append(type(data))
    found: dict[str, str] = {}
    for part in parts:
        if part is not None:
            found |= _source(part if inspect.isfunction(part) or isinstance(part, type) else type(part))
    return found


def data_of(job: Job, course: Course) -> dict[str, Any]:
    """How many samples there are, and a hash of what can be told of them without asking for any."""
    data = job.data.dataset if isinstance(job.data, DataLoader) else job.data
    told = outside_of(course.source.tensors if isinstance(course.source, Columns) else data)
    return {"samples": len(course.source), "sha256": hashlib.sha256(told.encode()).hexdigest()}


def shapes_of(model: nn.Module) -> dict[str, Any]:
    """Name and shape of every weight and buffer."""
    return {name: list(value.shape) for name, value in (*model.named_parameters(), *model.named_buffers())}


def _optimizer(optimizer: torch.optim.Optimizer) -> str:
    settings = {k: v for k, v in optimizer.defaults.items() if isinstance(v, (int, float, str, tuple))}
    return f"{type(optimizer).__name__}({', '.join(f'{k}={v}' for k, v in sorted(settings.items()))})"


def _named(value: Any) -> str:
    return str(getattr(value, "__qualname__", type(value).__name__))


def _source(part: Any) -> dict[str, str]:
    """The hash of the file a class or function comes from, unless that is a library's."""
    module = sys.modules.get(getattr(part, "__module__", "") or "")
    file = getattr(module, "__file__", None)
    if file is not None and _is_library(Path(file)):
        return {}
    try:
        text = Path(file).read_text(encoding="utf-8") if file is not None else inspect.getsource(part)
    except (OSError, TypeError, UnicodeDecodeError):
        return {}
    name = Path(file).name if file is not None else _named(part)
    return {name: hashlib.sha256(text.encode()).hexdigest()}


def _is_library(file: Path) -> bool:
    homes: Iterable[str] = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    homes = [*homes, str(Path(torch.__file__).parents[1])]
    return any(file.resolve().is_relative_to(Path(home).resolve()) for home in homes)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
