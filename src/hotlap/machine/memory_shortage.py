"""Why memory ran out: what was asked for, what torch holds without using it, and which other processes hold some."""

from __future__ import annotations

import ctypes
import gc
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotlap.core.units import MIB, show_bytes
from hotlap.machine.cuda import GpuProcess, cuda_gpu, free_for_torch, read_driver, same_gpu, started_nvml
from hotlap.machine.limits import read_memory

if TYPE_CHECKING:
    import torch

EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"
_ASKED = re.compile(rf"[Tt]ried to allocate {_SIZE}")
_UNUSED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
RETURNED_BYTES = 64 * MIB
"""Less than this, or than an eighth of what was free, has not returned: free memory of a host rises and falls."""
MOST_NAMED = 4
"""Other processes that are named; the rest are counted."""


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """The figures of one out of memory."""

    asked_bytes: int | None = None
    """What could not be allocated; None if the error does not say."""
    unused_bytes: int = 0
    """What torch had reserved and no tensor used."""
    others: tuple[GpuProcess, ...] = ()
    """Other processes that hold memory of the GPU."""

    @property
    def is_fragmented(self) -> bool:
        """Whether the unused memory would have been enough in one piece."""
        return self.asked_bytes is not None and 0 < self.asked_bytes <= self.unused_bytes

    @property
    def notes(self) -> list[str]:
        """The causes beyond the training's own size, and what helps, one line each."""
        found = []
        if self.is_fragmented:
            found.append(
                f"torch holds {show_bytes(self.unused_bytes)} in pieces too small for "
                f"{show_bytes(self.asked_bytes or 0)}" + ("" if _is_expandable() else f", which {EXPANDABLE} avoids")
            )
        if self.others:
            named = [_words(other) for other in self.others[:MOST_NAMED]]
            more = [f"{len(self.others) - MOST_NAMED} more"] if len(self.others) > MOST_NAMED else []
            found.append(f"other processes hold memory of this GPU: {', '.join([*named, *more])}")
        return found


def shortage(error: BaseException | None, device: torch.device, start: Callable[[], Any] = started_nvml) -> Shortage:
    """The figures of an out of memory, from its text and the driver."""
    texts = []
    while error is not None:
        texts.append(str(error))
        error = error.__cause__
    text = "\n".join(texts)
    return Shortage(
        asked_bytes=_bytes(_ASKED.search(text)),
        unused_bytes=_bytes(_UNUSED.search(text)) or 0,
        others=other_processes(device, start),
    )


def other_processes(device: torch.device, start: Callable[[], Any] = started_nvml) -> tuple[GpuProcess, ...]:
    """The other processes that hold memory of a GPU, the largest first; empty where the driver cannot tell.

    In a container the driver may number processes as the host does. Then this process is not in its list, and nothing
    tells which of them is this one.
    """
    if device.type != "cuda":
        return ()
    import torch

    mine = cuda_gpu(torch.cuda.current_device() if device.index is None else device.index)
    listed = next((gpu.processes for gpu in read_driver(start).gpus if same_gpu(gpu, mine.uuid, mine.bus_id)), None)
    return others_among(listed or (), os.getpid())


def others_among(listed: tuple[GpuProcess, ...], own: int) -> tuple[GpuProcess, ...]:
    """The processes that are not this one, if this one is listed."""
    if all(one.pid != own for one in listed):
        return ()
    return tuple(sorted((one for one in listed if one.pid != own), key=lambda one: -(one.bytes or 0)))


def held_bytes(device: torch.device) -> int:
    """The memory that tensors of this process occupy: torch's count on a GPU, else what the process has mapped."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.memory_allocated(device))
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[5])
    except (OSError, IndexError, ValueError):  # not Linux
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def free_bytes(device: torch.device) -> int:
    """The memory that tensors may still take; on the host within the limits of this process (`ulimit -v`, `-d`)."""
    if device.type == "cuda":
        return free_for_torch(device)
    limits = []
    with suppress(ImportError, OSError, IndexError, ValueError):  # not Linux
        import resource

        sizes = [int(pages) * os.sysconf("SC_PAGE_SIZE") for pages in Path("/proc/self/statm").read_text().split()]
        for kind, taken in ((resource.RLIMIT_AS, sizes[0]), (resource.RLIMIT_DATA, sizes[5])):
            soft = resource.getrlimit(kind)[0]
            limits += [max(0, soft - taken)] if soft != resource.RLIM_INFINITY else []
    return min((*limits, read_memory().free_bytes))


def has_returned(before: int, now: int, asked_bytes: int | None) -> bool:
    """Whether so much more memory is free than when it ran out that what was asked for may fit."""
    return now - before >= max(RETURNED_BYTES, asked_bytes or 0, before // 8)


def release_unused(device: torch.device) -> None:
    """Return memory that no tensor uses: torch's cache on a GPU, the allocator's on a host.

    From then on glibc maps each large tensor by itself, so that memory of the host no longer falls into pieces.
    """
    gc.collect()
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
        return
    with suppress(OSError, AttributeError):  # another C library
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, _MAPPED_BYTES)
        library.malloc_trim(0)


_MMAP_THRESHOLD, _MAPPED_BYTES = -3, 2**17
"""glibc's number of the setting, and its default, which it raises as tensors are freed."""


def _bytes(found: re.Match[str] | None) -> int | None:
    return None if found is None else round(float(found[1]) * _UNITS[found[2]])


def _words(process: GpuProcess) -> str:
    held = "an unknown amount" if process.bytes is None else show_bytes(process.bytes)
    return f"{process.name or 'a process of another user or container'} (pid {process.pid}) {held}"


def _is_expandable() -> bool:
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    return any("expandable_segments:True" in os.environ.get(name, "") for name in names)
