"""Readings of GPU and host: all that is known, and nothing that is not."""

import pytest
from fake_nvml import FakeNvml

from hotlap.monitor.hardware import GpuReader, HostReader, open_gpus

QUESTIONS = (
    "nvmlDeviceGetName", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetClockInfo", "nvmlDeviceGetMaxClockInfo",
    "nvmlDeviceGetTemperature", "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetPcieThroughput",
    "nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetProcessUtilization",
)  # fmt: skip


def test_a_reading_has_the_figures_of_the_driver_in_plain_units():
    assert GpuReader(FakeNvml(), 0).read() == {
        "index": 0, "name": "NVIDIA H200", "power_limit_w": 700.0, "most_sm_mhz": 1980.0, "busy": 0.97,
        "memory_busy": 0.4, "memory_used_bytes": 60, "memory_bytes": 140, "power_w": 412.0, "sm_mhz": 1650.0,
        "temperature_c": 54.0, "throttled": [], "pcie_in_bytes_per_s": 1024.0 * 1024,
        "pcie_out_bytes_per_s": 2048.0 * 1024, "others": 0,
    }  # fmt: skip


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_that_the_card_does_not_know_leaves_its_figure_out_and_is_not_asked_again(question):
    nvml = FakeNvml(question, running={1: 10, 2: 20}, sm_util={1: 5})
    reader = GpuReader(nvml, 0)
    whole = GpuReader(FakeNvml(running={1: 10, 2: 20}, sm_util={1: 5}), 0).read(own=(1,))
    found = reader.read(own=(1,))
    assert set(found) <= set(whole)
    asked = nvml.asked.count(question)
    for _ in range(30):
        reader.read(own=(1,))
    assert nvml.asked.count(question) == asked


def test_nothing_that_the_driver_does_raises():
    reader = GpuReader(FakeNvml(*QUESTIONS, "nvmlDeviceGetCurrentClocksThrottleReasons"), 0)
    assert reader.read(own=(1,)) == {"index": 0, "name": "NVIDIA GPU"}


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (0x0, []), (0x1, []), (0x10, []), (0x4, ["power limit"]), (0x20, ["heat"]), (0x40, ["heat"]),
        (0x20 | 0x40 | 0x4, ["heat", "power limit"]), (0x80, ["power brake"]), (0x8, ["hardware slowdown"]),
    ],
)  # fmt: skip
def test_what_lowers_the_clocks_is_named(bits, words):
    assert GpuReader(FakeNvml(reasons=bits), 0).read()["throttled"] == words


def test_an_older_driver_is_asked_in_its_own_words():
    nvml = FakeNvml("nvmlDeviceGetCurrentClocksEventReasons", reasons=0x4)
    assert GpuReader(nvml, 0).read()["throttled"] == ["power limit"]


def test_other_processes_are_counted_apart_with_their_memory_and_their_share():
    nvml = FakeNvml(running={10: 100, 20: 7, 30: 5}, sm_util={10: 60, 20: 30, 30: 5})
    found = GpuReader(nvml, 0).read(own=(10,))
    assert found["others"] == 2
    assert found["others_bytes"] == 12
    assert found["other_pids"] == [20, 30]
    assert found["others_busy"] == pytest.approx(0.35)


def test_in_a_container_that_numbers_processes_otherwise_the_training_is_no_other():
    assert GpuReader(FakeNvml(running={999: 100}), 0).read(own=(10,))["others"] == 0
    # Of two unknown ones, one is the training: which, nothing says.
    found = GpuReader(FakeNvml(running={999: 100, 998: 5}, sm_util={999: 90, 998: 9}), 0).read(own=(10,))
    assert found["others"] == 1
    assert "others_busy" not in found


def test_a_share_that_is_not_there_at_this_moment_is_asked_for_again():
    nvml = FakeNvml(running={10: 100, 20: 7})
    reader = GpuReader(nvml, 0)
    assert "others_busy" not in reader.read(own=(10,))
    nvml.now.sm_util = {20: 50}
    assert reader.read(own=(10,))["others_busy"] == 0.5


def test_pcie_which_takes_the_driver_long_is_asked_for_seldom():
    nvml = FakeNvml()
    reader = GpuReader(nvml, 0)
    readings = [reader.read() for _ in range(20)]
    assert nvml.asked.count("nvmlDeviceGetPcieThroughput") == 4
    assert all("pcie_in_bytes_per_s" in reading for reading in readings)


def test_the_gpu_of_a_training_is_found_by_what_cuda_knows_of_it():
    def start():
        return FakeNvml()

    assert len(open_gpus(start=start)[0]) == 1
    assert len(open_gpus("1234", None, start=start)[0]) == 1
    assert len(open_gpus("other", "0:65:00", start=start)[0]) == 1
    readers, why = open_gpus("other", "0:66:00", start=start)
    assert readers == []
    assert why == "the driver lists no such GPU"


def test_without_a_driver_there_is_no_gpu_and_a_reason():
    def start():
        raise OSError("no library\nat all")

    assert open_gpus(start=start) == ([], "no library")


def test_the_host_is_read_as_parts_of_what_it_has(tmp_path):
    reader = HostReader(tmp_path)
    found = reader.read()
    assert 0 <= found["cores_busy"] <= found["cores"]
    assert 0 < found["own_ram_bytes"] < found["ram_bytes"]
    assert 0 <= found["disk_used_bytes"] <= found["disk_bytes"]
    assert found["own_cores"] >= 0
    assert all(value >= 0 for value in found.values())


def test_work_of_this_process_is_seen_as_its_own(tmp_path, monkeypatch):
    reader = HostReader(tmp_path)
    spent = [0.0]
    monkeypatch.setattr("time.process_time", lambda: spent[0])
    monkeypatch.setattr("time.monotonic", lambda: 2 * spent[0])
    reader.read()
    spent[0] = 10.0
    assert reader.read()["own_cores"] == 0.5


def test_a_system_that_shows_nothing_of_others_stops_no_reading(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise PermissionError("/proc/stat")

    monkeypatch.setattr("psutil.cpu_times", refused)
    monkeypatch.setattr("psutil.disk_io_counters", lambda: None)
    reader = HostReader(tmp_path)
    found = reader.read()
    assert found["own_cores"] >= 0
    assert not {"cores_busy", "disk_read_bytes_per_s"} & set(found)
