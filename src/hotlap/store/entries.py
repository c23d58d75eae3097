"""What a cache entry holds, as files and back: tensors, arrays and plain values, nothing that could run code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotlap.core.errors import StoreError
from hotlap.store.disk import Piece
from hotlap.store.encoding import decode, encode, from_json, to_json
from hotlap.store.mapping import mapped
from hotlap.store.tensors import tensor_pieces, tensors_from

Arrays = Mapping[str, Tensor | np.ndarray[Any, Any]]
TENSORS, VALUES, INNER = "tensors.safetensors", "values.json", "values.safetensors"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What was stored, every byte as it was written: arrays as arrays, tensors as tensors on the CPU."""

    kind: str
    key: str
    tensors: dict[str, Any]
    values: Any
    facts: dict[str, Any]


def content_of(
    kind: str, key: str, tensors: Arrays, values: Any, facts: Mapping[str, Any]
) -> tuple[dict[str, Iterable[Piece]], Entry]:
    """The files of an entry, and the entry as it will be read; StoreError names what no safe file can hold."""
    plain = {name: _as_tensor(name, value) for name, value in tensors.items()}
    inner: dict[str, Tensor] = {}
    arrays = [name for name, value in tensors.items() if isinstance(value, np.ndarray)]
    try:
        coded = encode(values, inner, "values")
        text = to_json({"arrays": arrays, "values": coded})
    except StoreError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"the values cannot be stored: {error}") from None
    entry = Entry(
        kind=kind, key=key, tensors=_given_back(plain, arrays), values=decode(coded, inner), facts=dict(facts)
    )
    return {TENSORS: tensor_pieces(plain), VALUES: [text], INNER: tensor_pieces(inner)}, entry


def content_from(
    kind: str, key: str, files: Mapping[str, bytes], facts: dict[str, Any], *, tensors: Path | None = None
) -> Entry:
    """The entry of these files; StoreError where they are not an entry's.

    `tensors` is where the file of its tensors lies, if they are to stay on disk; it is not among `files` then.
    """
    if {*files, *([TENSORS] if tensors else [])} != {TENSORS, VALUES, INNER}:
        raise StoreError(f"its files are {', '.join(files) or 'none'}, not those of an entry")
    found = tensors_from(files[TENSORS], TENSORS) if tensors is None else mapped(tensors)
    inner = tensors_from(files[INNER], INNER)
    stored = from_json(files[VALUES], VALUES)
    try:
        arrays, coded = list(stored["arrays"]), stored["values"]
        values = decode(coded, inner)
        return Entry(kind=kind, key=key, tensors=_given_back(found, arrays), values=values, facts=facts)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise StoreError(f"{VALUES} is not in hotlap's form ({type(error).__name__})") from None


def _given_back(tensors: Mapping[str, Tensor], arrays: list[str]) -> dict[str, Any]:
    return {name: value.numpy() if name in arrays else value for name, value in tensors.items()}


def _as_tensor(name: str, value: Tensor | np.ndarray[Any, Any]) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    try:
        # A copy of the same shape: ascontiguousarray makes a row of a single number, and torch wants it writable.
        return torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape).copy())
    except (TypeError, ValueError, AttributeError) as error:
        raise StoreError(f"{name} cannot be stored as a tensor: {str(error).splitlines()[0]}") from None
