"""What the NVIDIA driver and torch say about the GPUs: versions, memory, architectures, other processes.

No question to the driver raises: where the driver, its library or one question fails, the answer is None.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

from hotlap.core.errors import first_line
from hotlap.core.warning_filters import recorded

if TYPE_CHECKING:
    import torch


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """A process that holds memory on a GPU."""

    pid: int
    bytes: int | None
    name: str | None
    """None if it runs in another container or belongs to another user."""


@dataclass(frozen=True, kw_only=True)
class DriverGpu:
    """One GPU as the driver lists it, visible to CUDA or not."""

    name: str
    uuid: str | None
    bus_id: str | None
    """`domain:bus:device`, lower-case hexadecimal."""
    total_bytes: int | None
    free_bytes: int | None
    utilisation: int | None
    """Per cent of the last sample in which any kernel ran, however well it used the GPU."""
    processes: tuple[GpuProcess, ...] | None


@dataclass(frozen=True, kw_only=True)
class Driver:
    """The driver and its GPUs."""

    version: str | None = None
    cuda: str | None = None
    """The newest CUDA this driver can run."""
    gpus: tuple[DriverGpu, ...] = ()
    error: str | None = None


@cache
def started_nvml() -> Any:
    """The NVML library, started once per process."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml


def read_driver(start: Callable[[], Any] = started_nvml) -> Driver:
    """Ask the driver about all its GPUs; without a driver the answer is empty and holds the reason."""
    try:
        nvml = start()
        count = int(nvml.nvmlDeviceGetCount())
    except Exception as error:
        return Driver(error=first_line(error))
    cuda = _ask(lambda: int(nvml.nvmlSystemGetCudaDriverVersion_v2()))
    gpus = (_ask(partial(_driver_gpu, nvml, index)) for index in range(count))
    return Driver(
        version=_ask(lambda: _string(nvml.nvmlSystemGetDriverVersion())),
        cuda=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        gpus=tuple(gpu for gpu in gpus if gpu is not None),
    )


def same_gpu(gpu: DriverGpu, uuid: str | None, bus_id: str | None) -> bool:
    """Whether the driver and CUDA mean the same GPU; an index does not tell, since users may reorder GPUs."""
    return same_place(gpu.uuid, gpu.bus_id, uuid, bus_id)


def same_place(uuid: str | None, bus_id: str | None, other_uuid: str | None, other_bus_id: str | None) -> bool:
    """Whether two GPUs are one, by their uuids and places on the bus, as far as these are known."""
    if uuid and other_uuid and _bare(uuid) == _bare(other_uuid):
        return True
    # A slice of a GPU (MIG) has its own uuid but shares its parent's place on the bus.
    return bus_id is not None and bus_id == other_bus_id


def _driver_gpu(nvml: Any, index: int) -> DriverGpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = _ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    pci = _ask(lambda: nvml.nvmlDeviceGetPciInfo(handle))
    return DriverGpu(
        name=_ask(lambda: _string(nvml.nvmlDeviceGetName(handle))) or "NVIDIA GPU",
        uuid=_ask(lambda: _string(nvml.nvmlDeviceGetUUID(handle))),
        bus_id=None if pci is None else bus_address(int(pci.domain), int(pci.bus), int(pci.device)),
        total_bytes=None if memory is None else int(memory.total),
        free_bytes=None if memory is None else int(memory.free),
        utilisation=_ask(lambda: int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
        processes=_ask(lambda: _processes(nvml, handle)),
    )


def bus_address(domain: int, bus: int, device: int) -> str:
    """`0:65:0` in the form both CUDA's and the driver's numbers are compared in."""
    return f"{domain:x}:{bus:02x}:{device:02x}"


def _processes(nvml: Any, handle: Any) -> tuple[GpuProcess, ...]:
    found = []
    for seen in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
        used = getattr(seen, "usedGpuMemory", None)
        found.append(
            GpuProcess(
                pid=int(seen.pid),
                bytes=None if used is None else int(used),
                name=_process_name(int(seen.pid)),
            )
        )
    return tuple(found)


def _process_name(pid: int) -> str | None:
    import psutil

    try:
        return psutil.Process(pid).name()
    except (psutil.Error, ValueError, OSError):
        return None


def _ask(question: Callable[[], T]) -> T | None:
    """The answer, or None: not every card and driver knows every question."""
    try:
        return question()
    except Exception:
        return None


def _string(value: Any) -> str:
    """Old bindings answer in bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _bare(uuid: str) -> str:
    return re.sub(r"^(gpu|mig)-", "", uuid.lower())


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
    """Whether this process had begun to use CUDA before this reading."""
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
    with recorded() as warned:
        try:
            if torch.cuda.is_available():
                gpus = tuple(cuda_gpu(index) for index in range(torch.cuda.device_count()))
            elif build is not None:
                torch.cuda.init()  # type: ignore[no-untyped-call]
        except Exception as error:
            error_line = first_line(error)
    if error_line is None and not gpus and warned:
        error_line = warned[0].strip().splitlines()[0]
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
    """The GPU memory that this process may take in total; a cap lowers it, as on a pretended GPU."""
    import torch

    total = torch.cuda.mem_get_info(device)[1]
    ask = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    return int(total * ask(device)) if ask is not None else int(total)


def free_for_torch(device: torch.device) -> int:
    """The GPU memory that tensors may still take: free memory and what torch holds for them, up to the cap."""
    import torch

    used = torch.cuda.memory_allocated(device)
    unused = torch.cuda.memory_reserved(device) - used
    return int(max(0, min(torch.cuda.mem_get_info(device)[0] + unused, usable_bytes(device) - used)))


def cuda_gpu(index: int) -> CudaGpu:
    """A GPU that torch sees, as CUDA numbers it."""
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
