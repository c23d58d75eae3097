"""The state of a training as JSON and tensors: reading it back can run no code."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotlap.core.errors import StoreError, first_line
from hotlap.store.tensors import why_not_stored

_PLAIN = (str, bool, type(None))
MOST_BITS = 4096
"""Larger integers are refused; Python itself reads at most 4,300 digits."""


def encode(value: Any, tensors: dict[str, Tensor], at: str) -> Any:
    """`value` as JSON; copies of its tensors go into `tensors` under names that begin with `at`.

    Raises StoreError for a value that is not a number, text, list, dict, tuple, array or tensor.
    """
    if isinstance(value, _PLAIN):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, Tensor):
        return _encode_tensor(value, tensors, at)
    if isinstance(value, (np.ndarray, np.generic)):
        # A numpy number stays one: it follows other rules than a Python number.
        kind = "$array" if isinstance(value, np.ndarray) else "$scalar"
        return {kind: _keep(_from_numpy(np.asarray(value), at), tensors, at)}
    if isinstance(value, int):
        if value.bit_length() > MOST_BITS:
            raise StoreError(f"{at} is a number of {value.bit_length():,} bits; hotlap stores at most {MOST_BITS:,}")
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, list):
        return [encode(part, tensors, f"{at}.{n}") for n, part in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [encode(part, tensors, f"{at}.{n}") for n, part in enumerate(value)]}
    if isinstance(value, Mapping):
        rows = [[_encode_key(k, at), encode(v, tensors, f"{at}.{k}")] for k, v in value.items()]
        return {"$counter" if isinstance(value, Counter) else "$dict": rows}
    raise StoreError(f"{at} is a {type(value).__name__}, which no file that is safe to read can hold")


def _encode_tensor(value: Tensor, tensors: dict[str, Tensor], at: str) -> Any:
    why = why_not_stored(value)
    if why:
        raise StoreError(f"{at} has {why}")
    name = _keep(value.detach().to("cpu", copy=True), tensors, at)
    strides = value.stride()
    turned = sorted(range(value.ndim), key=lambda n: -strides[n])
    # Memory order matters: a fused optimizer walks weight and state in parallel.
    if not value.is_contiguous() and value.permute(turned).is_contiguous():
        return {"$tensor": [name, value.device.type, turned]}
    return {"$tensor": [name, value.device.type]}


def _from_numpy(value: np.ndarray[Any, Any], at: str) -> Tensor:
    try:
        return torch.from_numpy(value.copy(order="C"))
    except (TypeError, ValueError):  # of objects, texts, dates, or another byte order
        raise StoreError(f"{at} is an array of {value.dtype}, which no file that is safe to read can hold") from None


def _keep(tensor: Tensor, tensors: dict[str, Tensor], at: str) -> str:
    """Store a tensor under `at` or a similar name: the keys 1 and "1" give the same name, and keys hold anything."""
    name = at.encode("utf-8", "backslashreplace").decode()
    number = 1
    while name in tensors:
        number += 1
        name = f"{at}#{number}".encode("utf-8", "backslashreplace").decode()
    tensors[name] = tensor
    return name


def _encode_key(key: Any, at: str) -> Any:
    if not _is_key(key):
        raise StoreError(f"{at} has a key of type {type(key).__name__}, which no file that is safe to read can hold")
    return encode(key, {}, at)


def decode(coded: Any, tensors: Mapping[str, Tensor], device: torch.device | None = None) -> Any:
    """The value that `encode` was given; tensors from a GPU go to `device`, or to the CPU if it is None.

    Raises StoreError, and nothing else, if `coded` is not a result of `encode`.
    """
    try:
        return _decode(coded, tensors, device)
    except (LookupError, TypeError, ValueError, OverflowError, RuntimeError) as error:  # also a RecursionError
        raise StoreError(f"the stored state does not have hotlap's format: {first_line(error)[:80]}") from None


def _decode(coded: Any, tensors: Mapping[str, Tensor], device: torch.device | None) -> Any:
    if isinstance(coded, list):
        return [_decode(part, tensors, device) for part in coded]
    if not isinstance(coded, dict):
        return coded
    if len(coded) != 1:
        raise ValueError(f"a value with {len(coded)} kinds")
    ((kind, inner),) = coded.items()
    match kind:
        case "$tensor":
            name, home, *turned = inner
            tensor = _turned(tensors[name], turned[0]) if turned else tensors[name]
            return tensor if home == "cpu" or device is None else tensor.to(device)
        case "$array":
            return tensors[inner].numpy()
        case "$scalar":
            return tensors[inner].numpy()[()]
        case "$float":
            return float(inner)
        case "$tuple":
            return tuple(_decode(part, tensors, device) for part in inner)
        case "$dict":
            return {_key(_decode(k, tensors, device)): _decode(v, tensors, device) for k, v in inner}
        case "$counter":
            return Counter({_key(_decode(k, tensors, device)): _decode(v, tensors, device) for k, v in inner})
    raise ValueError(f"{kind!r:.40}")


def _turned(tensor: Tensor, dims: list[int]) -> Tensor:
    """The same values, in memory in the order of these dimensions."""
    ordered = tensor.permute(dims).contiguous()
    return ordered.permute([dims.index(n) for n in range(tensor.ndim)])


def _is_key(value: Any) -> bool:
    if type(value) is tuple:
        return all(_is_key(part) for part in value)
    return isinstance(value, (str, int, float, bool, type(None))) and not isinstance(value, np.generic)


def _key(value: Any) -> Any:
    if not _is_key(value):
        raise TypeError(f"a {type(value).__name__} cannot be a key")
    return value


def to_json(value: Any) -> bytes:
    """JSON for hashing and storing: each value has one form."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
