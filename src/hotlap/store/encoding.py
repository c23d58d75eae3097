"""State of any training as JSON and tensors: nothing that could run code when it is read back."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotlap.core.errors import StoreError

_PLAIN = (str, bool, type(None))


def encode(value: Any, tensors: dict[str, Tensor], at: str) -> Any:
    """`value` as JSON; its tensors go into `tensors` under names that begin with `at`.

    Raises StoreError for a value that is no number, word, list, dict, tuple, array or tensor.
    """
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        tensors[at] = value.detach().to("cpu", copy=True)
        return {"$tensor": [at, value.device.type]}
    if isinstance(value, np.ndarray):
        tensors[at] = torch.from_numpy(np.ascontiguousarray(value).copy())
        return {"$array": at}
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, list):
        return [encode(part, tensors, f"{at}.{n}") for n, part in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [encode(part, tensors, f"{at}.{n}") for n, part in enumerate(value)]}
    if isinstance(value, Mapping):
        rows = [[encode(k, tensors, at), encode(v, tensors, f"{at}.{k}")] for k, v in value.items()]
        return {"$counter" if isinstance(value, Counter) else "$dict": rows}
    raise StoreError(f"{at} is a {type(value).__name__}, which no file that is safe to read can hold")


def decode(coded: Any, tensors: Mapping[str, Tensor], device: torch.device | None = None) -> Any:
    """What `encode` was given; tensors that were on a GPU go to `device`, or to the CPU without one."""
    if isinstance(coded, list):
        return [decode(part, tensors, device) for part in coded]
    if not isinstance(coded, dict):
        return coded
    if len(coded) != 1:
        raise StoreError("the stored state is not in hotlap's form")
    ((kind, inner),) = coded.items()
    try:
        match kind:
            case "$tensor":
                name, home = inner
                return tensors[name] if home == "cpu" or device is None else tensors[name].to(device)
            case "$array":
                return tensors[inner].numpy()
            case "$float":
                return float(inner)
            case "$tuple":
                return tuple(decode(part, tensors, device) for part in inner)
            case "$dict":
                return {_key(decode(k, tensors)): decode(v, tensors, device) for k, v in inner}
            case "$counter":
                return Counter({_key(decode(k, tensors)): decode(v, tensors, device) for k, v in inner})
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"the stored state is not in hotlap's form: {error}") from None
    raise StoreError(f"the stored state is not in hotlap's form: {kind!r}")


def _key(value: Any) -> Any:
    if not isinstance(value, (str, int, float, bool, tuple, type(None))):
        raise TypeError(f"a {type(value).__name__} is no key")
    return value


def to_json(value: Any) -> bytes:
    """JSON as it is hashed and stored: one way to write each value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def from_json(content: bytes, name: str) -> Any:
    """The value of a JSON file; StoreError where it is none, or nested beyond reason."""
    try:
        return json.loads(content)
    except RecursionError:
        raise StoreError(f"{name} is nested too deeply") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise StoreError(f"{name} is not JSON: {error}") from None
