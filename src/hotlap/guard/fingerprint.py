"""What can be told of data from outside, so that it is known again; no sample is asked for.

A sample may be broken, or move a generator that the dataset keeps.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

WHOLE_BYTES = 32 * 1024 * 1024
"""Tensors up to this size are hashed whole; of larger ones evenly spread rows."""
ENTRIES = 1000
"""Entries of a list or dict that are looked at, evenly spread."""
DEPTH, WHOLE_DEPTH = 4, 12


def outside_of(value: Any, *, whole: bool = False) -> str:
    """A text that differs where two values do: numbers, words and tensors by what they hold, objects by their parts.

    `whole` looks at every byte, entry and depth instead of a spread of them, and at size and time of files that
    are named: for a cache, where a difference that is not seen gives a wrong result.
    """
    return _told(value, whole, 0)


def _told(value: Any, whole: bool, depth: int) -> str:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.dtype.isnative:
        return _tensor(torch.from_numpy(np.ascontiguousarray(value)), whole)
    if isinstance(value, Tensor):
        return _tensor(value, whole)
    if isinstance(value, (bytes, int, float, bool, type(None))):
        return repr(value)
    if isinstance(value, (str, os.PathLike)):
        return f"{value!r}{_file(os.fspath(value)) if whole else ''}"
    if depth >= (WHOLE_DEPTH if whole else DEPTH):
        return type(value).__qualname__
    if isinstance(value, (list, tuple)):
        spread = value if whole else value[:: max(1, len(value) // ENTRIES)]
        return f"{len(value)}[{','.join(_told(part, whole, depth + 1) for part in spread)}]"
    if isinstance(value, Mapping):
        entries = list(value.items())
        spread = entries if whole else entries[:: max(1, len(entries) // ENTRIES)]
        return f"{len(value)}{{{','.join(f'{key!r}:{_told(part, whole, depth + 1)}' for key, part in spread)}}}"
    parts = sorted(getattr(value, "__dict__", {}).items())
    return f"{type(value).__qualname__}({','.join(f'{k}={_told(part, whole, depth + 1)}' for k, part in parts)})"


def _tensor(tensor: Tensor, whole: bool) -> str:
    flat = tensor.detach().reshape(len(tensor), -1) if tensor.ndim else tensor.detach().reshape(1, 1)
    step = 1 if whole else max(1, -(-flat.numel() * flat.element_size() // WHOLE_BYTES))
    rows = flat[::step].cpu().contiguous().reshape(-1)
    digest = hashlib.sha256(rows.view(torch.uint8).numpy().data if rows.numel() else b"")
    return f"{tensor.dtype}{tuple(tensor.shape)}{digest.hexdigest()}"


def _file(name: str | bytes) -> str:
    """Size and time of a file, where the word names one."""
    if not isinstance(name, str) or not 0 < len(name) < 1024:
        return ""
    try:
        found = Path(name).stat()
    except (OSError, ValueError):
        return ""
    return f"<{found.st_size} {found.st_mtime_ns}>"
