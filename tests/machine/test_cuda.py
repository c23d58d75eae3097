"""The driver's answers, and what is left when it gives none."""

from __future__ import annotations

import os
from types import SimpleNamespace

from hotlap.machine import cuda
from hotlap.machine.cuda import DriverGpu, bus_address, read_driver, same_gpu


class FakeNvml:
    """One GPU; questions named in `broken` raise as the real library does."""

    def __init__(self, *broken: str) -> None:
        self.broken = broken

    def __getattribute__(self, name: str):
        if name.startswith("nvml") and name in object.__getattribute__(self, "broken"):
            raise RuntimeError("Not Supported")
        return object.__getattribute__(self, name)

    def nvmlDeviceGetCount(self):  # noqa: N802
        return 1

    def nvmlSystemGetDriverVersion(self):  # noqa: N802
        return b"580.65"

    def nvmlSystemGetCudaDriverVersion_v2(self):  # noqa: N802
        return 13010

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return index

    def nvmlDeviceGetName(self, handle):  # noqa: N802
        return "Tesla T4"

    def nvmlDeviceGetUUID(self, handle):  # noqa: N802
        return "GPU-AbC"

    def nvmlDeviceGetPciInfo(self, handle):  # noqa: N802
        return SimpleNamespace(domain=0, bus=0x65, device=0)

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        return SimpleNamespace(total=100, free=60)

    def nvmlDeviceGetUtilizationRates(self, handle):  # noqa: N802
        return SimpleNamespace(gpu=7)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802
        return [
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=40),
            SimpleNamespace(pid=2**30, usedGpuMemory=None),
        ]


def test_everything_the_driver_knows_is_read():
    driver = read_driver(FakeNvml)
    assert (driver.version, driver.cuda, driver.error) == ("580.65", "13.1", None)
    (gpu,) = driver.gpus
    assert (gpu.name, gpu.uuid, gpu.bus_id) == ("Tesla T4", "GPU-AbC", "0:65:00")
    assert (gpu.total_bytes, gpu.free_bytes, gpu.utilisation) == (100, 60, 7)
    mine, strange = gpu.processes
    assert mine.name
    assert mine.bytes == 40
    assert (strange.pid, strange.bytes, strange.name) == (2**30, None, None)


def test_one_failed_question_leaves_that_answer_unknown():
    for question, field in {
        "nvmlDeviceGetUtilizationRates": "utilisation",
        "nvmlDeviceGetComputeRunningProcesses": "processes",
        "nvmlDeviceGetMemoryInfo": "free_bytes",
        "nvmlDeviceGetPciInfo": "bus_id",
        "nvmlDeviceGetUUID": "uuid",
    }.items():
        driver = read_driver(lambda question=question: FakeNvml(question))
        assert getattr(driver.gpus[0], field) is None
        assert driver.gpus[0].name == "Tesla T4"


def test_a_gpu_that_fell_off_the_bus_is_left_out():
    driver = read_driver(lambda: FakeNvml("nvmlDeviceGetHandleByIndex"))
    assert (driver.gpus, driver.version) == ((), "580.65")


def test_without_a_driver_the_answer_is_empty_and_says_why():
    def start():
        raise OSError("NVML Shared Library Not Found\nmore")

    driver = read_driver(start)
    assert (driver.version, driver.gpus, driver.error) == (None, (), "NVML Shared Library Not Found")


def test_the_library_is_started_once_per_process(monkeypatch):
    import pynvml

    started = []
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: started.append(1))
    cuda.started_nvml.cache_clear()
    try:
        assert cuda.started_nvml() is cuda.started_nvml()
        assert started == [1]
    finally:
        cuda.started_nvml.cache_clear()


def listed(uuid, bus_id):
    return DriverGpu(name="x", uuid=uuid, bus_id=bus_id, total_bytes=1, free_bytes=1, utilisation=0, processes=())


def test_gpus_are_matched_by_uuid_or_place_on_the_bus_and_never_by_index():
    gpu = listed("GPU-AAAA", bus_address(0, 1, 0))
    assert same_gpu(gpu, "aaaa", None)
    assert same_gpu(gpu, "bbbb", "0:01:00")  # a MIG slice: its own uuid, its parent's place
    assert not same_gpu(gpu, "bbbb", "0:02:00")
    assert not same_gpu(listed(None, None), None, None)
