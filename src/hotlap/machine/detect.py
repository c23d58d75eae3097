"""What this machine is, read once per process."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from hotlap.core.errors import MachineError
from hotlap.machine.catalogue import GpuModel, find_gpu, recognise
from hotlap.machine.cuda import Cuda, Driver, DriverGpu, free_bytes, read_cuda, read_driver, same_gpu
from hotlap.machine.disk import DiskSpeed, Room, measure_disk, read_room
from hotlap.machine.dtypes import run_kernel, times_as_long
from hotlap.machine.host import battery_charge, swapped_bytes
from hotlap.machine.limits import ROOT, Cpu, HostMemory, busy_share, read_cpu, read_memory
from hotlap.machine.runtimes import Runtime, read_runtime


def missing_names() -> dict[str, str]:
    """Private names of torch that hotlap uses and this torch lacks, with what needs each of them."""
    from hotlap.core.torch_private import missing

    return {probe.name: probe.needed_by for probe in missing()}


@dataclass(frozen=True, kw_only=True)
class World:
    """Where all facts come from: by default this machine; a test brings another."""

    driver: Callable[[], Driver] = read_driver
    cuda: Callable[[], Cuda] = read_cuda
    free_bytes: Callable[[int], int | None] = free_bytes
    kernel: Callable[[str, str], str | None] = run_kernel
    """Takes a device and a format; returns None, or in one line why the kernel failed."""
    pace: Callable[[str], float] = times_as_long
    """How many times as long as in fp32 the CPU takes in a format."""
    room: Callable[[Path], Room | None] = read_room
    measure_disk: Callable[[Path], DiskSpeed] = measure_disk
    which: Callable[[str], str | None] = shutil.which
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    root: Path = ROOT
    folder: Path = field(default_factory=Path.cwd)
    """Where runs are written."""
    busy_share: Callable[[], float] = busy_share
    """The part of the cores at work."""
    battery: Callable[[], float | None] = battery_charge
    """The charge of the battery that the machine runs on."""
    swapped: Callable[[], int | None] = swapped_bytes
    """Bytes moved in and out of swap so far."""
    clock: Callable[[], float] = time.monotonic
    affinity: int | None = None
    """Cores the scheduler allows; None asks it."""
    has_module: Callable[[str], bool] | None = None
    missing_names: Callable[[], Mapping[str, str]] = missing_names
    """Private names that torch lacks, with what needs each of them; asked only where torch can be imported."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU that torch can see; its kernels may still fail."""

    index: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int
    usable_bytes: int
    """What hotlap may use: less than `memory_bytes` under a pretended, smaller GPU."""
    model: str | None
    """Its key in the catalogue; None where it is not listed."""

    @property
    def device(self) -> str:
        """As torch writes it: `cuda:0`."""
        return f"cuda:{self.index}"

    @property
    def sm(self) -> str:
        """As torch lists architectures: `sm_90`."""
        return f"sm_{self.capability[0]}{self.capability[1]}"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What does not change about the machine while a process runs."""

    gpus: tuple[Gpu, ...]
    hidden_gpus: tuple[str, ...]
    """Names of GPUs the driver lists and torch does not see."""
    visible_devices: str | None
    """CUDA_VISIBLE_DEVICES; None where it is not set."""
    cpu: Cpu
    memory: HostMemory
    torch: str | None
    cuda: str | None
    """The CUDA version torch was built for; None for a CPU build."""
    cudnn: str | None
    architectures: tuple[str, ...]
    """Those this build of torch has kernels for."""
    cuda_error: str | None
    driver: str | None
    driver_cuda: str | None
    runtime: Runtime | None
    pretended: GpuModel | None

    @property
    def hidden_on_purpose(self) -> bool:
        """Whether CUDA_VISIBLE_DEVICES is what leaves torch without a GPU.

        Schedulers set it on every job, so its presence proves nothing. CUDA reads it up to the first
        entry that names no GPU.
        """
        if self.visible_devices is None or self.gpus:
            return False
        first = self.visible_devices.split(",")[0].strip()
        if first.isdecimal():
            return bool(self.hidden_gpus) and int(first) >= len(self.hidden_gpus)
        return not first.lower().startswith(("gpu-", "mig-"))


def detect(pretend: str | None = None) -> Machine:
    """This machine; `pretend` (or HOTLAP_PRETEND) names a GPU of the catalogue to act as.

    Raises MachineError where that name is unknown or ambiguous.
    """
    model = pretended_gpu(pretend, os.environ)
    return _detected(model.key if model else None)


@cache
def _detected(key: str | None) -> Machine:
    world = World()
    # The driver first: once CUDA has started, this process itself is on the GPU.
    driver = world.driver()
    return assemble(world, driver, world.cuda(), find_gpu(key) if key else None)


def pretended_gpu(pretend: str | None, environ: Mapping[str, str]) -> GpuModel | None:
    """The GPU to act as: the argument, else HOTLAP_PRETEND, else none."""
    if pretend is not None:
        return find_gpu(pretend)
    asked = environ.get("HOTLAP_PRETEND", "").strip()
    if not asked:
        return None
    try:
        return find_gpu(asked)
    except MachineError as error:
        raise MachineError(f"HOTLAP_PRETEND: {error}") from None


def assemble(world: World, driver: Driver, cuda: Cuda, model: GpuModel | None) -> Machine:
    """One value out of what the driver, torch and the system say."""
    gpus = []
    for seen in cuda.gpus:
        known = recognise(seen.name, seen.memory_bytes)
        usable = seen.memory_bytes if model is None else min(seen.memory_bytes, model.usable_bytes)
        gpus.append(
            Gpu(
                index=seen.index,
                name=seen.name,
                capability=seen.capability,
                memory_bytes=seen.memory_bytes,
                usable_bytes=usable,
                model=known.key if known else None,
            )
        )
    return Machine(
        gpus=tuple(gpus),
        hidden_gpus=tuple(gpu.name for gpu in driver.gpus if not _visible(gpu, cuda)),
        visible_devices=world.environ.get("CUDA_VISIBLE_DEVICES"),
        cpu=read_cpu(world.root, world.affinity),
        memory=read_memory(world.root),
        torch=cuda.torch,
        cuda=cuda.build,
        cudnn=cuda.cudnn,
        architectures=cuda.architectures,
        cuda_error=cuda.error,
        driver=driver.version,
        driver_cuda=driver.cuda,
        runtime=read_runtime(world.environ, world.root, world.has_module),
        pretended=model,
    )


def driver_gpu(driver: Driver, cuda: Cuda, index: int) -> DriverGpu | None:
    """The driver's entry for the GPU that CUDA calls `index`."""
    seen = next(gpu for gpu in cuda.gpus if gpu.index == index)
    return next((gpu for gpu in driver.gpus if same_gpu(gpu, seen.uuid, seen.bus_id)), None)


def _visible(gpu: DriverGpu, cuda: Cuda) -> bool:
    return any(same_gpu(gpu, seen.uuid, seen.bus_id) for seen in cuda.gpus)
