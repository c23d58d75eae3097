"""A machine made of values: GPUs, driver, files and variables as a test wants them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hotlap.machine.cuda import Cuda, CudaGpu, Driver, DriverGpu
from hotlap.machine.detect import World
from hotlap.machine.disk import DiskSpeed, Room

GIB = 1024**3
TESTED = "2.13.0+cu130"
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
CARDS = {
    "p100": ("Tesla P100-PCIE-16GB", (6, 0), 16280 * 1024**2),
    "v100": ("Tesla V100-SXM2-16GB", (7, 0), 16160 * 1024**2),
    "t4": ("Tesla T4", (7, 5), 15095 * 1024**2),
    "h200": ("NVIDIA H200", (9, 0), 143156 * 1024**2),
}


@pytest.fixture
def card() -> Callable[..., CudaGpu]:
    """`card("t4", 0)`: a GPU as CUDA describes it."""

    def make(key: str, index: int = 0) -> CudaGpu:
        name, capability, memory = CARDS[key]
        return CudaGpu(
            index=index,
            name=name,
            capability=capability,
            memory_bytes=memory,
            uuid=f"uuid-{key}-{index}",
            bus_id=f"0:0{index}:00",
        )

    return make


@pytest.fixture
def listed() -> Callable[..., DriverGpu]:
    """`listed("t4", 0)`: the same GPU as the driver lists it."""

    def make(key: str, index: int = 0, **changes: Any) -> DriverGpu:
        name, _, memory = CARDS[key]
        values: dict[str, Any] = {
            "name": name,
            "uuid": f"GPU-uuid-{key}-{index}",
            "bus_id": f"0:0{index}:00",
            "total_bytes": memory,
            "free_bytes": memory,
            "utilisation": 0,
            "processes": (),
        }
        return DriverGpu(**{**values, **changes})

    return make


@pytest.fixture
def world(tmp_path: Path) -> Callable[..., World]:
    """A healthy machine with the GPUs given; every part can be replaced."""
    root = tmp_path / "root"
    (root / "dev/shm").mkdir(parents=True)
    folder = tmp_path / "folder"
    folder.mkdir()

    def make(
        *gpus: CudaGpu,
        driver: Driver | None = None,
        cuda: Cuda | None = None,
        environ: dict[str, str] | None = None,
        **parts: Any,
    ) -> World:
        seen = cuda or Cuda(torch=TESTED, build="13.0", architectures=ARCHITECTURES, gpus=gpus)
        parts.setdefault("busy_share", lambda: 0.0)
        known = driver or Driver(
            version="580.1",
            cuda="13.0",
            gpus=tuple(
                DriverGpu(
                    name=gpu.name,
                    uuid=f"GPU-{gpu.uuid}",
                    bus_id=gpu.bus_id,
                    total_bytes=gpu.memory_bytes,
                    free_bytes=gpu.memory_bytes,
                    utilisation=0,
                    processes=(),
                )
                for gpu in seen.gpus
            ),
        )
        values: dict[str, Any] = {
            "driver": lambda: known,
            "cuda": lambda: seen,
            "free_bytes": lambda index: None,
            "kernel": lambda device, dtype: None,
            "pace": lambda dtype: 1.0,
            "room": lambda path: Room(total_bytes=100 * GIB, free_bytes=50 * GIB),
            "measure_disk": lambda path: DiskSpeed(write_bytes_per_s=1e9, read_bytes_per_s=1e9),
            "which": lambda name: f"/usr/bin/{name}",
            "environ": environ or {},
            "root": root,
            "folder": folder,
            "affinity": 4,
            "has_module": lambda name: False,
        }
        return World(**{**values, **parts})

    return make
