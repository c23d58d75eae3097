"""What the NVIDIA driver says: versions, memory, who else is on the GPU.

Nothing here raises: where the driver, its library or one question fails, the answer is None.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

from hotlap.machine.kernels import first_line

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """A process that holds memory on a GPU."""

    pid: int
    bytes: int | None
    name: str | None
    """None where it runs in another container or belongs to somebody else."""


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
    """Per cent of the last sample in which any kernel ran: says nothing about how well it ran."""
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
def _started() -> Any:
    """The NVML library, started once per process."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml


def read_driver(start: Callable[[], Any] = _started) -> Driver:
    """Ask the driver about all its GPUs; an empty answer with the reason where there is none."""
    try:
        nvml = start()
        count = int(nvml.nvmlDeviceGetCount())
    except Exception as error:
        return Driver(error=first_line(error))
    cuda = _ask(lambda: int(nvml.nvmlSystemGetCudaDriverVersion_v2()))
    gpus = (_ask(partial(_gpu, nvml, index)) for index in range(count))
    return Driver(
        version=_ask(lambda: _string(nvml.nvmlSystemGetDriverVersion())),
        cuda=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        gpus=tuple(gpu for gpu in gpus if gpu is not None),
    )


def same_gpu(gpu: DriverGpu, uuid: str | None, bus_id: str | None) -> bool:
    """Whether the driver's GPU is the one CUDA means; never by index, which the user may reorder."""
    if uuid and gpu.uuid and _bare(uuid) == _bare(gpu.uuid):
        return True
    # A slice of a GPU (MIG) has its own uuid but shares its parent's place on the bus.
    return bus_id is not None and bus_id == gpu.bus_id


def _gpu(nvml: Any, index: int) -> DriverGpu:
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
    """The answer, or None: cards and drivers differ in which questions they know."""
    try:
        return question()
    except Exception:
        return None


def _string(value: Any) -> str:
    """Old bindings answer in bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _bare(uuid: str) -> str:
    return re.sub(r"^(gpu|mig)-", "", uuid.lower())
