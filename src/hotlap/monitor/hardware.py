"""What GPU and host do at this moment: one reading after the other, each as figures by name.

A figure that the driver or the system does not have is left out. No reading raises.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from hotlap.core.errors import first_line
from hotlap.machine.cuda import bus_address, same_place, started_nvml
from hotlap.machine.host import battery_charge, swapped_bytes
from hotlap.machine.limits import read_memory

T = TypeVar("T")
Figures = dict[str, Any]

THROTTLES = {
    0x2: "clocks set lower",
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x20: "heat",
    0x40: "heat",
    0x80: "power brake",
}
"""What lowers the clocks, by the bits of NVML. An idle GPU and one that waits for another are left out."""
SELDOM = 10
"""Only every so many readings asks for traffic on PCIe, over which the driver looks for 20 ms, and for a battery."""
SHM = Path("/dev/shm")


class GpuReader:
    """Reads one GPU by NVML. A question that the card or its driver does not know is asked once."""

    def __init__(self, nvml: Any, index: int) -> None:
        self._nvml, self._handle = nvml, nvml.nvmlDeviceGetHandleByIndex(index)
        self._unknown: set[str] = set()
        self._readings, self._pcie, self._looked_us = 0, Figures(), 0
        name = self._ask("name", lambda: nvml.nvmlDeviceGetName(self._handle))
        self.name = (name.decode(errors="replace") if isinstance(name, bytes) else name) or "NVIDIA GPU"
        self.index = index
        """As the driver numbers GPUs, whatever CUDA_VISIBLE_DEVICES says."""
        self._fixed = _known(
            index=index,
            name=self.name,
            power_limit_w=self._milli("nvmlDeviceGetEnforcedPowerLimit"),
            most_sm_mhz=self._ask("most_sm", lambda: float(nvml.nvmlDeviceGetMaxClockInfo(self._handle, 1))),
        )

    def read(self, own: Sequence[int] = ()) -> Figures:
        """The figures of this moment; processes other than `own` are counted apart."""
        nvml, handle = self._nvml, self._handle
        rates = self._ask("rates", lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        memory = self._ask("memory", lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        if self._readings % SELDOM == 0:
            self._pcie = _known(
                pcie_in_bytes_per_s=self._ask("rx", lambda: 1024.0 * nvml.nvmlDeviceGetPcieThroughput(handle, 1)),
                pcie_out_bytes_per_s=self._ask("tx", lambda: 1024.0 * nvml.nvmlDeviceGetPcieThroughput(handle, 0)),
            )
        self._readings += 1
        return {
            **self._fixed,
            **_known(
                busy=None if rates is None else rates.gpu / 100,
                memory_busy=None if rates is None else rates.memory / 100,
                memory_used_bytes=None if memory is None else int(memory.used),
                memory_bytes=None if memory is None else int(memory.total),
                power_w=self._milli("nvmlDeviceGetPowerUsage"),
                sm_mhz=self._ask("sm", lambda: float(nvml.nvmlDeviceGetClockInfo(handle, 1))),
                temperature_c=self._ask("heat", lambda: float(nvml.nvmlDeviceGetTemperature(handle, 0))),
                throttled=self._throttled(),
            ),
            **self._pcie,
            **self._others(own),
        }

    def _throttled(self) -> list[str] | None:
        """What lowers the clocks; empty where nothing does, None where the driver does not say."""
        for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            bits = self._ask(name, lambda name=name: int(getattr(self._nvml, name)(self._handle)))  # type: ignore[misc]
            if bits is not None:
                return sorted({words for bit, words in THROTTLES.items() if bits & bit})
        return None

    def _others(self, own: Sequence[int]) -> Figures:
        """The other processes on the GPU, what memory they hold, and the part of the time in which they computed."""
        nvml, handle = self._nvml, self._handle
        running = self._ask("processes", lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        if running is None:
            return {}
        held = {int(one.pid): int(getattr(one, "usedGpuMemory", None) or 0) for one in running}
        # In a container the driver may number processes as the host does: then the own ones are not among them.
        if own and len(held) == 1:
            return {"others": 0}
        others = {pid: taken for pid, taken in held.items() if pid not in own}
        is_known = not own or len(others) < len(held)
        found: Figures = {"others": len(others) if is_known else len(held) - 1}
        if others and is_known:
            found["others_bytes"] = sum(others.values())
            found["other_pids"] = sorted(others)[:8]
            busy = self._busy_of(set(others))
            found |= {} if busy is None else {"others_busy": busy}
        return found

    def _busy_of(self, pids: set[int]) -> float | None:
        since, self._looked_us = self._looked_us, int(time.time() * 1e6)
        seen = self._ask("share", lambda: self._nvml.nvmlDeviceGetProcessUtilization(self._handle, since))
        return None if seen is None else min(1.0, sum(one.smUtil for one in seen if int(one.pid) in pids) / 100)

    def _milli(self, name: str) -> float | None:
        return self._ask(name, lambda: getattr(self._nvml, name)(self._handle) / 1000)

    def _ask(self, name: str, question: Callable[[], T]) -> T | None:
        if name in self._unknown:
            return None
        try:
            return question()
        except Exception as error:
            if not isinstance(error, LookupError) and "NotFound" not in type(error).__name__:
                self._unknown.add(name)
            return None


def open_gpus(
    uuid: str | None = None, bus_id: str | None = None, start: Callable[[], Any] = started_nvml
) -> tuple[list[GpuReader], str | None]:
    """Readers of all GPUs, or of the one that CUDA describes so; and why there is none."""
    try:
        nvml = start()
        indices = range(int(nvml.nvmlDeviceGetCount()))
    except Exception as error:
        return [], first_line(error)
    found = []
    for index in indices:
        with suppress(Exception):  # a card that has fallen off the bus
            if (uuid, bus_id) == (None, None) or _is_it(nvml, index, uuid, bus_id):
                found.append(GpuReader(nvml, index))
    return found, None if found else "the driver lists no such GPU"


def _is_it(nvml: Any, index: int, uuid: str | None, bus_id: str | None) -> bool:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    its_uuid, place = nvml.nvmlDeviceGetUUID(handle), None
    with suppress(Exception):
        pci = nvml.nvmlDeviceGetPciInfo(handle)
        place = bus_address(int(pci.domain), int(pci.bus), int(pci.device))
    its_uuid = its_uuid.decode(errors="replace") if isinstance(its_uuid, bytes) else its_uuid
    return same_place(its_uuid, place, uuid, bus_id)


class HostReader:
    """Reads cores, memory, swap, shared memory, battery and the disk of a folder."""

    def __init__(self, folder: Path | None = None) -> None:
        import psutil

        self._psutil, self._process, self._folder = psutil, psutil.Process(), folder
        self._cores = os.cpu_count() or 1
        self._before, self._readings, self._charge = self._counters(), 0, battery_charge()

    def read(self) -> Figures:
        """The figures of this moment; those of work are since the last reading."""
        before, now = self._before, self._counters()
        self._before = now
        span_s = max(1e-6, now["clock"] - before["clock"])
        memory = read_memory()
        self._readings += 1
        if self._readings % SELDOM == 0:
            self._charge = battery_charge()
        found = _known(
            cores=self._cores,
            own_cores=max(0.0, (now["own_s"] - before["own_s"]) / span_s),
            ram_used_bytes=memory.allowed_bytes - memory.free_bytes,
            ram_bytes=memory.allowed_bytes,
            own_ram_bytes=self._own_ram(),
            battery=self._charge,
            **_room("shm", SHM),
            **(_room("disk", self._folder) if self._folder is not None else {}),
        )
        if "busy_s" in now and "busy_s" in before:
            found["cores_busy"] = round(min(self._cores, max(0.0, (now["busy_s"] - before["busy_s"]) / span_s)), 4)
        if "swap_bytes" in now and "swap_bytes" in before:
            found["swap_bytes_per_s"] = round(max(0.0, now["swap_bytes"] - before["swap_bytes"]) / span_s, 1)
        if "read_bytes" in now and "read_bytes" in before:
            for name in ("read", "written"):
                found[f"disk_{name}_bytes_per_s"] = max(0.0, now[f"{name}_bytes"] - before[f"{name}_bytes"]) / span_s
        return found

    def _counters(self) -> dict[str, float]:
        found = {"clock": time.monotonic(), "own_s": time.process_time()}
        with suppress(Exception):  # some systems show no process what the others do
            times: Any = self._psutil.cpu_times()
            idle_s = times.idle + getattr(times, "iowait", 0.0)
            guests_s = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
            found["busy_s"] = sum(times) - guests_s - idle_s
        with suppress(Exception):  # or keep no count
            disks: Any = self._psutil.disk_io_counters()
            found |= {"read_bytes": disks.read_bytes, "written_bytes": disks.write_bytes}
        if (swapped := swapped_bytes()) is not None:
            found["swap_bytes"] = swapped
        return found

    def _own_ram(self) -> int | None:
        with suppress(Exception):
            return int(self._process.memory_info().rss)
        return None


def _room(name: str, folder: Path) -> Figures:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return {}
    return {f"{name}_used_bytes": usage.used, f"{name}_bytes": usage.total}


def _known(**figures: Any) -> Figures:
    return {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in figures.items()
        if value is not None
    }
