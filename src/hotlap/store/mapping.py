"""Tensors of a file that stay on disk: each part of them is read when it is looked at, and given up under pressure."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hotlap.core.errors import StoreError
from hotlap.store.tensors import MOST_HEADER_BYTES, NAMES

_DTYPES = {name: dtype for dtype, name in NAMES.items()}


def mapped(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file; what is written to them never reaches the file.

    The file may be removed meanwhile: its bytes stay until the last tensor goes. Raises StoreError where it is no
    safetensors file. Whether its bytes are those that were written is for others to check.
    """
    try:
        # A private map: torch refuses none of it, and the file stays as it is.
        raw = torch.from_numpy(np.memmap(path, np.uint8, mode="c"))
    except (OSError, ValueError) as error:
        raise StoreError(f"{path.name} cannot be mapped: {error}") from None
    try:
        header_bytes = int.from_bytes(bytes(raw[:8].tolist()), "little")
        if not 0 < header_bytes <= min(MOST_HEADER_BYTES, len(raw) - 8):
            raise ValueError("its header has no length")
        header = json.loads(raw[8 : 8 + header_bytes].numpy().tobytes())
        header.pop("__metadata__", None)
        body = raw[8 + header_bytes :]
        return {name: _part(body, **entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise StoreError(f"{path.name} is not a good safetensors file: {str(error).splitlines()[0]}") from None


def _part(body: Tensor, *, dtype: str, shape: list[int], data_offsets: list[int]) -> Tensor:
    start, end = data_offsets
    return body[start:end].view(_DTYPES[dtype]).reshape(shape)
