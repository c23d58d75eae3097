"""The current CUDA stream, asked for cheaply, because every batch asks several times."""

from __future__ import annotations

import torch

from hotlap.core.torch_private import current_raw_stream, or_none

_ask = or_none(current_raw_stream)
_known: dict[tuple[int, int], torch.cuda.Stream] = {}


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """torch's current stream of a GPU; the same object each time for the same stream."""
    if _ask is None or device.index is None:
        return torch.cuda.current_stream(device)
    key = device.index, _ask(device.index)
    if key not in _known:
        _known[key] = torch.cuda.current_stream(device)
    return _known[key]


def is_capturing() -> bool:
    """Whether work launched now is recorded into a CUDA graph instead of executed."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
