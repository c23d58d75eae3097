"""The identity of a training: its settings, code, data and model; how two identities differ; and the exact one."""

from __future__ import annotations

import functools
import hashlib
import inspect
import platform
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from hotlap import __version__
from hotlap.core.code_reads import file_of, is_library, is_users_function
from hotlap.core.job import Job
from hotlap.core.torch_private import backward_hooks_of_all, forward_hooks_of_all, forward_pre_hooks_of_all, or_none
from hotlap.data.content_keys import ContentKeys, users_hooks
from hotlap.data.dataset import OrderedDataset
from hotlap.data.sources import Columns
from hotlap.guard.fingerprint import CODE, SHORT, Holdings, describe

MAY_CHANGE = ("epochs", "steps", "patience", "eval_every", "device", "skip_bad_samples")
"""Settings for how long and where to train: a resumed training may have others."""
HELD_FORM = 2
"""Version of the fingerprints of held parts; across versions hotlap compares only those that are plain text."""
SHOWN = 60
"""Characters of a value in a message about a difference."""
_PLAIN = (int, float, str, bool, type(None))
_MOVED_BY_SCHEDULES = ("lr", "betas", "momentum")
_BY_PLAN = ("fused", "foreach", "capturable")


def identity(job: Job, dataset: OrderedDataset, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """The identity of a training as JSON; `optimizer` is the one that the job's function made."""
    return {
        "settings": settings_of(job, optimizer),
        "code": code_of(job),
        "data": data_of(job, dataset),
        "model": shapes_of(job.model),
        "held": held_by(job, optimizer),
        "held form": HELD_FORM,
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """How two identities differ, one line each; settings that may change are left out."""
    found = []
    for part in ("settings", "code", "data", "model"):
        old, new = _part(before, part), _part(now, part)
        for name in sorted({*old, *new}):
            if old.get(name) == new.get(name) or (part == "settings" and name in MAY_CHANGE):
                continue
            if part == "code":
                found.append(f"the code of {name} {'differs' if name in old and name in new else 'is new or missing'}")
            else:
                was, now_is = _apart(repr(old.get(name)), repr(new.get(name)))
                found.append(f"{part}: {name} was {was}, is {now_is}")
    alike = before.get("held form") == now.get("held form") if isinstance(before, Mapping) else False
    return found + _held_apart(_part(before, "held"), _part(now, "held"), found, alike=alike)


def _held_apart(before: dict[str, Any], now: dict[str, Any], found: list[str], *, alike: bool) -> list[str]:
    """How two trainings differ in what their functions and objects hold; parts that only one has are left out.

    Earlier versions of hotlap lack some parts, and the settings show parts that are new or missing. Unless both have
    `alike` versions, only parts that are plain text in both count.
    """
    lines: dict[str, None] = {}
    file_changed = any(line.startswith("the code of ") for line in found)  # which covers all code
    reported = {line.partition(" was ")[0] for line in found}
    for part in sorted({*before} & {*now}):
        if f"settings: {part}" in reported:
            continue  # a different object
        old, new = _part(before, part), _part(now, part)
        names = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
        if not alike:
            names = [name for name in names if name in old and name in new and _are_readable(old[name], new[name])]
        code, values = [n for n in names if n.startswith(CODE)], [n for n in names if not n.startswith(CODE)]
        if not file_changed:
            lines |= dict.fromkeys(f"the {name} differs" for name in code)
        if values:
            words = "; ".join(_change(name, old.get(name), new.get(name)) for name in values)
            lines[f"{part}: what it holds differs" + (f" ({words})" if len(words) <= 2 * SHOWN else "")] = None
    return [line for line in lines if line not in found]


def _change(name: str, old: Any, new: Any) -> str:
    return f"{name} was {old}, is {new}" if _are_readable(old, new) and not name.startswith(CODE) else name


def _are_readable(old: Any, new: Any) -> bool:
    """Whether both are plain text, not hashes."""
    return all(isinstance(text, str) and len(text) <= SHORT and not text.startswith("sha256 ") for text in (old, new))


def _part(known: Any, name: str) -> dict[str, Any]:
    # A checkpoint may be untrusted.
    part = known.get(name) if isinstance(known, Mapping) else None
    return part if isinstance(part, dict) else {}


def settings_of(job: Job, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """The job's settings; objects count by class and, if known, by constructor arguments."""
    settings = {name: value if isinstance(value, _PLAIN) else _described(value) for name, value in vars(job).items()}
    made = optimizer if optimizer is not None else job.optimizer
    if isinstance(made, Optimizer):
        settings["optimizer"] = _optimizer(made, scheduled=job.schedule is not None)
    settings["metrics"] = ", ".join(job.metric_names)
    if not job.reorder:
        del settings["reorder"]  # as in runs of versions without this setting
    if not job.skip_bad_samples:
        del settings["skip_bad_samples"]
    if isinstance(job.data, DataLoader):
        batches = job.data.batch_sampler
        settings["batch_size"], settings["drop_last"] = job.data.batch_size, job.data.drop_last
        settings["order"] = _named(batches.sampler if type(batches) is BatchSampler else batches)
        settings["collate"] = _named(job.data.collate_fn)
    return settings


def code_of(job: Job) -> dict[str, str]:
    """A hash of each of the user's source files that takes part; per class or function where there is no file."""
    parts: list[Any] = [type(layer) for layer in job.model.modules()]
    parts += [job.loss, job.forward, job.prepare, job.augment, job.collate, job.optimizer, job.schedule]
    if isinstance(job.loss, nn.Module):
        parts += [type(layer) for layer in job.loss.modules()]
    if isinstance(job.metrics, Mapping):
        parts += job.metrics.values()
    for data in (job.data, job.valid):
        if isinstance(data, DataLoader):
            parts += [data.dataset, data.collate_fn, data.sampler, data.batch_sampler]
        elif not isinstance(data, (Tensor, tuple, dict, list)):
            parts.append(data)
    found: dict[str, set[str]] = {}
    for origin in dict.fromkeys(origin for part in parts if part is not None for origin in _origins(part)):
        for name, digest in _source(origin).items():
            found.setdefault(name, set()).add(digest)
    # Files of the same name in two folders count as one.
    return {name: _hash(*sorted(digests)) if len(digests) > 1 else min(digests) for name, digests in found.items()}


def data_of(job: Job, dataset: OrderedDataset) -> dict[str, Any]:
    """The number of samples, and a hash of the data, as far as it is known without fetching samples."""
    data = job.data.dataset if isinstance(job.data, DataLoader) else job.data
    content = describe(dataset.source.tensors if isinstance(dataset.source, Columns) else data)
    found: dict[str, Any] = {"samples": len(dataset.source), "sha256": _hash(content)}
    if job.valid is not None:
        valid = job.valid.dataset if isinstance(job.valid, DataLoader) else job.valid
        found["validation sha256"] = _hash(describe(valid.tensors if type(valid) is TensorDataset else valid))
    return found


def shapes_of(model: nn.Module) -> dict[str, Any]:
    """Name and shape of every weight and buffer, and each layer's `extra_repr`, such as the rate of a dropout."""
    shapes: dict[str, Any] = {
        name: list(value.shape) for name, value in (*model.named_parameters(), *model.named_buffers())
    }
    layers = {name or "the model": layer.extra_repr() for name, layer in model.named_modules()}
    return shapes | {f"({name})": text for name, text in layers.items() if text}


def held_by(job: Job, optimizer: Optimizer | None = None) -> dict[str, dict[str, str]]:
    """What the job's functions, objects, loss and model hold: closures, defaults, attributes, and globals they read."""
    loss = job.loss if isinstance(job.loss, nn.Module) else None
    own = [job.model] if loss is None else [job.model, loss]
    datasets = {name: _dataset(getattr(job, name)) for name in ("data", "valid")}
    holdings = Holdings(own, datasets)
    found = {
        name: holdings.of(part)
        for name, part in functions_of(job).items()
        if part is not None and not isinstance(part, (str, Optimizer)) and part is not loss
    }
    if loss is not None:
        constants = getattr(type(loss), "__constants__", ())  # the settings show them
        found["loss"] = {name: text for name, text in holdings.of_module(loss).items() if name not in constants}
        if type(loss).__module__.startswith("torch.nn"):  # its buffers, such as class weights, are settings
            found["loss"] |= {f"its {name}": describe(buffer) for name, buffer in loss.named_buffers()}
    found["model"] = holdings.of_module(job.model)
    made = optimizer if optimizer is not None else job.optimizer
    if isinstance(made, Optimizer):
        found["optimizer"] = found.get("optimizer", {}) | holdings.of_optimizer(made, parameter_names(own))
    return found | {name: holdings.of_data(data) for name, data in datasets.items()}


def functions_of(job: Job) -> dict[str, Any]:
    """The job's functions and objects besides model and data, by purpose; None where the job has none."""
    names = ("loss", "forward", "prepare", "augment", "collate", "optimizer", "schedule", "order")
    parts: dict[str, Any] = {name: getattr(job, name) for name in names}
    if isinstance(job.metrics, Mapping):
        parts |= {f"metric {name}": metric for name, metric in job.metrics.items()}
    if isinstance(job.data, DataLoader):
        batches = job.data.batch_sampler
        parts["collate"] = job.data.collate_fn
        parts["order"] = batches.sampler if type(batches) is BatchSampler else batches
        parts["worker_init_fn"] = job.data.worker_init_fn
    if isinstance(job.valid, DataLoader):
        parts["collate of the validation data"] = job.valid.collate_fn
    return parts


def parameter_names(modules: Sequence[nn.Module]) -> dict[int, str]:
    """The name of every parameter by its id; those of the loss begin with `loss.`"""
    return {
        id(parameter): f"loss.{name}" if number else name
        for number, module in enumerate(modules)
        for name, parameter in module.named_parameters()
    }


def _dataset(data: Any) -> Any:
    return data.dataset if isinstance(data, DataLoader) else data


def _optimizer(optimizer: Optimizer, *, scheduled: bool) -> str:
    """Class and settings of an optimizer, and what differs in each group, unless a schedule changes it."""
    plain = {k: v for k, v in optimizer.defaults.items() if isinstance(v, (int, float, str, tuple))}
    parts = [_settings_text(plain)]
    for group in optimizer.param_groups:
        moving = _MOVED_BY_SCHEDULES if scheduled else ()
        own = {k: v for k, v in group.items() if k in plain and v != plain[k] and k not in (*moving, *_BY_PLAN)}
        parts += [f"{len(group['params'])} parameters: {_settings_text(own)}"] if own else []
    return f"{type(optimizer).__name__}({'; '.join(parts)})"


def _settings_text(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sorted(settings.items()))


def _described(value: Any) -> str:
    if isinstance(value, functools.partial):
        words = [*map(str, (v for v in value.args if isinstance(v, _PLAIN)))]
        words += [f"{k}={v}" for k, v in sorted(value.keywords.items()) if isinstance(v, (*_PLAIN, tuple))]
        return f"{_described(value.func)}({', '.join(words)})"
    constants = {name: getattr(value, name, None) for name in getattr(type(value), "__constants__", ())}
    return _named(value) + (f"({_settings_text(constants)})" if constants and isinstance(value, nn.Module) else "")


def _named(value: Any) -> str:
    return str(getattr(value, "__qualname__", type(value).__name__))


def _origins(part: Any) -> list[Any]:
    """The functions and classes behind a part of a job; classes with their bases."""
    if isinstance(part, functools.partial):
        return _origins(part.func)
    if inspect.ismethod(part):
        return [part.__func__, *_origins(type(part.__self__))]
    if inspect.isfunction(part):
        return [part]
    return [*(part if isinstance(part, type) else type(part)).__mro__]


def _hash(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode(errors="surrogatepass")).hexdigest()


def _source(part: Any) -> dict[str, str]:
    """The hash of the source file of a class or function, unless it is a library's."""
    file = file_of(getattr(part, "__module__", None))
    if file is not None and is_library(file):
        return {}
    try:
        text = file.read_text(encoding="utf-8") if file is not None else inspect.getsource(part)
    except (OSError, TypeError, UnicodeDecodeError):
        return {}  # `held_by` covers its bytecode
    name = file.name if file is not None else _named(part)
    return {name: _hash(text)}


def _apart(old: str, new: str) -> tuple[str, str]:
    """Two texts, shortened so that the difference shows."""
    if max(len(old), len(new)) <= SHOWN:
        return old, new
    pairs = enumerate(zip(old, new, strict=False))
    common = next((n for n, (a, b) in pairs if a != b), min(len(old), len(new)))
    # From the start of the setting that differs.
    start = max(old.rfind(" ", 0, common), old.rfind("(", 0, common)) + 1

    def cut(text: str) -> str:
        rest = text[start:]
        return ("…" if start else "") + (rest if len(rest) <= SHOWN else f"{rest[: SHOWN - 2]}…")

    return cut(old), cut(new)


# --- the exact identity, for reusing a trained model ---------------------------------------------------


def exact_identity(
    job: Job, optimizer: Optimizer, scheduler: Any, device: torch.device
) -> tuple[dict[str, str], list[str]]:
    """A hash of every part that decides the training, by name; and a line for each thing that no hash can know."""
    loss = job.loss if isinstance(job.loss, nn.Module) else None
    own = [job.model] if loss is None else [job.model, loss]
    keys = ContentKeys(own, optimizer)
    parts: dict[str, Any] = {"model": job.model, "schedule made": scheduler, **functions_of(job)}
    parts |= {"data": job.data, "valid": job.valid, "metrics": job.metrics}
    found = {name: keys.key(name, part) for name, part in parts.items()}
    found["layers"] = keys.key_of_layers(own)
    found["optimizer made"] = keys.key_of_optimizer(optimizer, parameter_names(own))
    found["process"] = keys.key("the process", _process(device))
    return found, list(keys.unknown)


def _process(device: torch.device) -> dict[str, Any]:
    """Settings of torch and the process that change numbers."""
    tables = (forward_hooks_of_all, forward_pre_hooks_of_all, backward_hooks_of_all)
    patched = {
        f"{space.__name__}.{name}": value
        for space in (torch, nn.functional)
        for name, value in vars(space).items()
        if isinstance(value, types.FunctionType) and is_users_function(value)
    }
    return {
        "versions": [__version__, str(torch.__version__), np.__version__, platform.python_version()],
        "device": [device.type, torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()],
        "dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "autocast": [
            (kind, torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind))) for kind in ("cpu", "cuda")
        ],
        "hooks": [hook for table in tables for hook in users_hooks(or_none(table))],
        "patched": patched,
    }
