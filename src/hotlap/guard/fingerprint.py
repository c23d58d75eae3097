"""What can be told of data from outside, so that it is known again; no sample is asked for.

A sample may be broken, or move a generator that the dataset keeps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

WHOLE_BYTES = 32 * 1024 * 1024
"""Tensors up to this size are hashed whole; of larger ones evenly spread rows."""
ENTRIES = 1000
"""Entries of a list or dict that are looked at, evenly spread."""
DEPTH = 4


def outside_of(value: Any, depth: int = 0) -> str:
    """A text that differs where two values do: numbers, words and tensors by what they hold, objects by their parts."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.dtype.isnative:
        return _tensor(torch.from_numpy(np.ascontiguousarray(value)))
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, (str, bytes, int, float, bool, type(None))):
        return repr(value)
    if depth >= DEPTH:
        return type(value).__qualname__
    if isinstance(value, (list, tuple)):
        spread = value[:: max(1, len(value) // ENTRIES)]
        return f"{len(value)}[{','.join(outside_of(part, depth + 1) for part in spread)}]"
    if isinstance(value, Mapping):
        entries = list(value.items())[:: max(1, len(value) // ENTRIES)]
        return f"{len(value)}{{{','.join(f'{key!r}:{outside_of(part, depth + 1)}' for key, part in entries)}}}"
    parts = sorted(getattr(value, "__dict__", {}).items())
    return f"{type(value).__qualname__}({','.join(f'{name}={outside_of(part, depth + 1)}' for name, part in parts)})"


def _tensor(tensor: Tensor) -> str:
    flat = tensor.detach().reshape(len(tensor), -1) if tensor.ndim else tensor.detach().reshape(1, 1)
    step = max(1, -(-flat.numel() * flat.element_size() // WHOLE_BYTES))
    rows = flat[::step].cpu().contiguous().reshape(-1)
    digest = hashlib.sha256(rows.view(torch.uint8).numpy().data if rows.numel() else b"")
    return f"{tensor.dtype}{tuple(tensor.shape)}{digest.hexdigest()}"
