"""Checks of data before it is read: whether it is what batches can be made of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hotlap.core.errors import kind_of, shown
from hotlap.core.warning_filters import filtered

MOST_LOOKED_AT = 2**28
"""Numbers of a column whose values are looked at: 0.2 s in fp32, on one core at 2.1 GHz."""
ABSURD = 1e12
"""A number this large is a fault of the data: its square times a few weights overflows fp32."""


def data_problems(name: str, data: Any) -> list[str]:
    """What is wrong with training or validation data, one line each; nothing is read but its outside."""
    found = []
    loaded = isinstance(data, DataLoader)
    if loaded:
        if data.batch_sampler is None:
            found.append(f"{name} is a DataLoader without batches (batch_size=None); give it a batch size")
        if type(data).__iter__ is not DataLoader.__iter__:
            found.append(
                f"{name} is a {type(data).__name__} with an __iter__ of its own, which would not be called; "
                "give a plain DataLoader, or loop over yours and hand each batch to a Rig"
            )
        if not isinstance(data.dataset, IterableDataset) and not hasattr(data.sampler, "__len__"):
            found.append(f"the sampler of {name} has no length; give it __len__")
        data = data.dataset
    if loaded and isinstance(data, (tuple, Mapping)):  # to a DataLoader these are samples like any others
        return [*found, f"{name} is empty"] if not len(data) else found
    if is_columns(data) or type(data) is TensorDataset:
        return found + _column_problems(name, _columns_in(data))
    if isinstance(data, (tuple, Mapping)):
        return found + _not_columns(name, named_columns(data))
    problem = _sample_problem(name, data, loaded=loaded)
    return [*found, problem] if problem else found


def double_problems(name: str, data: Any, model: torch.nn.Module) -> list[str]:
    """Which columns are of double precision while the model is not, where they go into it as they are."""
    held = [p.dtype for p in model.parameters()]
    narrow = next((dtype for dtype in held if dtype.is_floating_point), None)
    data = data.dataset if isinstance(data, DataLoader) else data
    stores = hasattr(data, "stored_columns")  # windows of a series: hotlap's own, which this room does not know
    if narrow is None or torch.float64 in held or not (stores or is_columns(data) or type(data) is TensorDataset):
        return []
    word = str(narrow).removeprefix("torch.")
    return [
        f"{_label(name, key)} is float64 while the model is {word}; give it {_cure(column, narrow)}"
        for key, column in (data.stored_columns if stores else _columns_in(data)).items()
        if _torch_dtype(column) == torch.float64
    ]


def value_warnings(name: str, data: Any) -> list[str]:
    """Numbers in training data that spoil weights, a line for each column: NaN, infinity, or absurd sizes.

    Only tensors and arrays in memory are looked at, each up to `MOST_LOOKED_AT` numbers; no code of a dataset runs.
    """
    data = data.dataset if isinstance(data, DataLoader) else data
    if not (is_columns(data) or type(data) is TensorDataset):
        return []
    found = (_value_warning(_label(name, key), column) for key, column in _columns_in(data).items())
    return [line for line in found if line is not None]


def _value_warning(label: str, column: torch.Tensor | np.ndarray[Any, Any]) -> str | None:
    if isinstance(column, np.memmap):  # may be larger than memory, on a slow disk
        return None
    tensor = column.detach() if isinstance(column, torch.Tensor) else None
    if isinstance(column, np.ndarray) and column.dtype.kind == "f" and _torch_dtype(column) is not None:
        with filtered():  # of arrays that cannot be written to: nothing is
            tensor = torch.as_tensor(np.ascontiguousarray(column, column.dtype.newbyteorder("=")))
    if tensor is None or not tensor.is_floating_point() or not tensor.numel():
        return None
    tensor = tensor[: max(1, MOST_LOOKED_AT * len(tensor) // tensor.numel())]
    low, high = (float(bound) for bound in torch.aminmax(tensor))
    if math.isfinite(low) and math.isfinite(high):
        largest = max(-low, high)
        if largest < ABSURD:
            return None
        return f"{label} holds numbers as large as {largest:.3g}; scale it: networks train on numbers near 1"
    spoilt = ~torch.isfinite(tensor).reshape(len(tensor), -1)
    rows = spoilt.any(1).nonzero()
    count = int(spoilt.sum())
    numbers = "1 number that is" if count == 1 else f"{count:,} numbers that are"
    return (
        f"{label} holds {numbers} NaN or infinite, the first in row {int(rows[0])}; "
        "unless your model or loss masks them, all weights become NaN: remove or fill them"
    )


def is_columns(data: Any) -> bool:
    """Whether `data` is one or several tensors or arrays that share their first dimension."""
    if isinstance(data, (torch.Tensor, np.ndarray)):
        return True
    if not isinstance(data, (Mapping, tuple)):
        return False
    return _are_columns(named_columns(data).values())


def named_columns(data: Any) -> dict[Any, Any]:
    """The tensors or arrays of `is_columns` data by key; a lone one has the key ''."""
    if isinstance(data, Mapping):
        return dict(data)
    if isinstance(data, tuple):
        return dict(enumerate(data))
    return {"": data}


def dtype_problem(label: str, column: torch.Tensor | np.ndarray[Any, Any]) -> str | None:
    """Why torch cannot index batches out of a column of this dtype, or None where it can."""
    dtype = _torch_dtype(column)
    if dtype is None:
        return f"{label} has dtype {column.dtype}, which torch cannot hold; turn it into numbers first"
    if dtype in (torch.uint16, torch.uint32, torch.uint64):
        return f"{label} has dtype {column.dtype}, which torch cannot index; make it a signed integer"
    return None


def _sample_problem(name: str, data: Any, *, loaded: bool) -> str | None:
    if isinstance(data, type):
        return f"{name} is the class {data.__name__}; did you mean {data.__name__}(…)?"
    if isinstance(data, (str, bytes)):
        return f"{name} is the text {shown(data)}; read the file, and give tensors, arrays or a Dataset"
    if isinstance(data, IterableDataset):
        return f"{name} is an IterableDataset, which has no order to keep; give it an index (a map-style Dataset)"
    if _is_frame(data):
        return f"{name} is a data frame; give arrays: (df[inputs].to_numpy('float32'), df[y].to_numpy())"
    # In a DataLoader a list can only be samples; by itself it is most likely meant as columns.
    if not loaded and isinstance(data, list) and data and _are_columns(data):
        return f"{name} is a list of tensors; give columns as a tuple (x, y), or samples as a Dataset"
    if not hasattr(data, "__getitem__"):
        return f"{name} must be tensors, arrays, a Dataset, a DataLoader or indexable, not {kind_of(data)}"
    if not hasattr(data, "__len__"):
        return f"{name} is {type(data).__name__}, which has no length; give it __len__"
    return f"{name} is empty" if len(data) == 0 else None


def _not_columns(name: str, columns: dict[Any, Any]) -> list[str]:
    found = []
    for key, column in columns.items():
        if _is_frame(column):
            found.append(f"{_label(name, key)} belongs to a data frame; give it .to_numpy()")
        elif not isinstance(column, (torch.Tensor, np.ndarray)):
            found.append(f"{_label(name, key)} is {kind_of(column)}; give a tensor or an array")
    return found


def _column_problems(name: str, columns: dict[Any, Any]) -> list[str]:
    found, lengths = [], {}
    for key, column in columns.items():
        label = _label(name, key)
        problem = dtype_problem(label, column)
        if problem:
            found.append(problem)
        elif column.ndim == 0:
            found.append(f"{label} is a single number; data needs a first dimension of samples")
        else:
            lengths[label] = len(column)
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{label} has {n}" for label, n in lengths.items())
        found.append(f"the parts of {name} differ in length: {listed}")
    elif not columns or 0 in lengths.values():
        found.append(f"{name} is empty")
    return found


def _columns_in(data: Any) -> dict[Any, Any]:
    return named_columns(data.tensors if isinstance(data, TensorDataset) else data)


def _are_columns(values: Iterable[Any]) -> bool:
    return all(isinstance(value, (torch.Tensor, np.ndarray)) for value in values)


def _is_frame(value: object) -> bool:
    return type(value).__module__.split(".")[0] in ("pandas", "polars")


def _label(name: str, key: object) -> str:
    return name if isinstance(key, str) and key == "" else f"{name}[{shown(key)}]"


def _torch_dtype(column: torch.Tensor | np.ndarray[Any, Any]) -> torch.dtype | None:
    """The dtype that torch gives a column, or None where it cannot hold it."""
    if isinstance(column, torch.Tensor):
        return column.dtype
    try:
        return torch.from_numpy(np.empty(0, column.dtype.newbyteorder("="))).dtype
    except TypeError:
        return None


def _cure(column: torch.Tensor | np.ndarray[Any, Any], narrow: torch.dtype) -> str:
    if isinstance(column, torch.Tensor):
        return f".to({narrow})"
    return ".astype('float32')" if narrow == torch.float32 else f"as a tensor .to({narrow})"
