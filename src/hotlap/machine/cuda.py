"""What torch says about CUDA: its build, its architectures, the GPUs it can see."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hotlap.machine.kernels import first_line
from hotlap.machine.nvml import bus_address

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class CudaGpu:
    """One GPU as CUDA numbers it."""

    index: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int
    uuid: str | None = None
    bus_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class Cuda:
    """torch's view of CUDA."""

    torch: str | None = None
    """torch's version; None where torch cannot be imported."""
    build: str | None = None
    """The CUDA (or ROCm) version torch was built for; None for a CPU build."""
    cudnn: str | None = None
    architectures: tuple[str, ...] = ()
    gpus: tuple[CudaGpu, ...] = ()
    in_use: bool = False
    """Whether this very process had begun to use CUDA before it was asked."""
    error: str | None = None
    """Why there is no GPU, where torch gave a reason."""


def read_cuda() -> Cuda:
    """Ask torch; starts CUDA where there is a GPU. Never raises."""
    try:
        import torch
    except Exception as error:  # a broken install raises OSError and others, not only ImportError
        return Cuda(error=first_line(error))
    build = torch.version.cuda or (f"ROCm {torch.version.hip}" if torch.version.hip else None)
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpus: tuple[CudaGpu, ...] = ()
    error_line: str | None = None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            if torch.cuda.is_available():
                gpus = tuple(_gpu(index) for index in range(torch.cuda.device_count()))
            elif build is not None:
                torch.cuda.init()  # type: ignore[no-untyped-call]
        except Exception as error:
            error_line = first_line(error)
    if error_line is None and not gpus and said:
        error_line = str(said[0].message).strip().splitlines()[0]
    return Cuda(
        torch=torch.__version__,
        build=build,
        cudnn=_cudnn(),
        architectures=tuple(torch.cuda.get_arch_list()) if gpus or build else (),
        gpus=gpus,
        in_use=in_use,
        error=error_line,
    )


def free_bytes(index: int) -> int | None:
    """Free memory of a visible GPU as CUDA sees it; None where it cannot say."""
    import torch

    try:
        return int(torch.cuda.mem_get_info(index)[0])
    except Exception:
        return None


def usable_bytes(device: torch.device) -> int:
    """What this process may take of a GPU's memory in all: less than there is under a cap, as on a pretended GPU."""
    import torch

    total = torch.cuda.mem_get_info(device)[1]
    ask = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    return int(total * ask(device)) if ask is not None else int(total)


def free_for_torch(device: torch.device) -> int:
    """What tensors may still take of a GPU's memory: what is free, and what torch holds for them, under the cap."""
    import torch

    used = torch.cuda.memory_allocated(device)
    unused = torch.cuda.memory_reserved(device) - used
    return int(max(0, min(torch.cuda.mem_get_info(device)[0] + unused, usable_bytes(device) - used)))


def _gpu(index: int) -> CudaGpu:
    import torch

    seen = torch.cuda.get_device_properties(index)
    place = [getattr(seen, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    uuid = getattr(seen, "uuid", None)
    return CudaGpu(
        index=index,
        name=seen.name,
        capability=(seen.major, seen.minor),
        memory_bytes=int(seen.total_memory),
        uuid=None if uuid is None else str(uuid),
        bus_id=None if None in place else bus_address(*(int(part) for part in place if part is not None)),
    )


def _cudnn() -> str | None:
    import torch

    try:
        number = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    except Exception:
        return None
    if number is None:
        return None
    major = 10000 if number >= 90000 else 1000  # cuDNN 9 widened its numbers
    return f"{number // major}.{number % major // 100}.{number % 100}"
