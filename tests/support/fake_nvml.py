"""A made-up NVML of one GPU, whose figures a test sets; questions in `broken` raise as the real library does."""

from types import SimpleNamespace


class NVMLErrorNotSupported(Exception):  # noqa: N818
    """The card does not know the question."""


class NVMLErrorNotFound(Exception):  # noqa: N818
    """There is nothing to tell at this moment."""


class FakeNvml:
    """Functions by the names of pynvml."""

    def __init__(self, *broken, **figures):
        self.broken, self.asked = set(broken), []
        defaults = {
            "name": "NVIDIA H200", "uuid": "GPU-1234", "busy": 97, "memory_busy": 40, "used": 60, "total": 140,
            "power_mw": 412_000, "limit_mw": 700_000, "sm": 1650, "most_sm": 1980, "heat": 54, "reasons": 0,
            "pcie": (2048, 1024), "running": {}, "sm_util": None,
        }  # fmt: skip
        self.now = SimpleNamespace(**{**defaults, **figures})

    def __getattr__(self, name):
        if not name.startswith("nvml"):
            raise AttributeError(name)
        self.asked.append(name)
        if name in self.broken:
            raise NVMLErrorNotSupported(name)
        now = self.now
        answers = {
            "nvmlDeviceGetCount": lambda: 1,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetName": lambda gpu: now.name,
            "nvmlDeviceGetUUID": lambda gpu: now.uuid,
            "nvmlDeviceGetPciInfo": lambda gpu: SimpleNamespace(domain=0, bus=0x65, device=0),
            "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=now.busy, memory=now.memory_busy),
            "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(
                used=now.used, free=now.total - now.used, total=now.total
            ),
            "nvmlDeviceGetPowerUsage": lambda gpu: now.power_mw,
            "nvmlDeviceGetEnforcedPowerLimit": lambda gpu: now.limit_mw,
            "nvmlDeviceGetClockInfo": lambda gpu, kind: now.sm,
            "nvmlDeviceGetMaxClockInfo": lambda gpu, kind: now.most_sm,
            "nvmlDeviceGetTemperature": lambda gpu, kind: now.heat,
            "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: now.reasons,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: now.reasons,
            "nvmlDeviceGetPcieThroughput": lambda gpu, way: now.pcie[way],
            "nvmlDeviceGetComputeRunningProcesses": lambda gpu: [
                SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in now.running.items()
            ],
            "nvmlDeviceGetProcessUtilization": self._shares,
        }
        if name not in answers:
            raise AttributeError(name)
        return answers[name]

    def _shares(self, gpu, since):
        if self.now.sm_util is None:
            raise NVMLErrorNotFound
        return [SimpleNamespace(pid=pid, smUtil=share) for pid, share in self.now.sm_util.items()]
