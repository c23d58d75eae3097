"""How long a device computes for a step: when a script is looked at, and that it is soon left alone."""

from types import SimpleNamespace

import pytest
import torch

from hotlap.script import training
from hotlap.script.training import LOOKS, MOST_S, ComputeTimer


class Device:
    """A GPU that computes a step in so many seconds, and a host that asks for it in so many."""

    def __init__(self, *, host_s, device_s):
        self.now, self.host_s, self.device_s, self.slept = 0.0, host_s, device_s, 0.0
        self.free_at = 0.0

    def step(self):
        self.now += self.host_s
        # What was asked for early is computed without a gap; the rest as it is asked for.
        self.free_at = max(self.now, self.free_at + self.device_s)

    def sleep(self, cycles):
        self.free_at = max(self.free_at, self.now) + cycles / training.CLOCK_HZ
        self.slept += cycles / training.CLOCK_HZ

    def event(self, enable_timing):
        device = self

        class Event:
            def record(self):
                self.at = max(device.free_at, device.now)

            def synchronize(self):
                device.now = max(device.now, self.at)

            def elapsed_time(self, other):
                return 1000 * (other.at - self.at)

        return Event()


@pytest.fixture
def looking(monkeypatch):
    def made(**times):
        device = Device(**times)
        monkeypatch.setattr(training.time, "perf_counter", lambda: device.now)
        cuda = SimpleNamespace(device=lambda at: torch.inference_mode(False), Event=device.event)
        monkeypatch.setattr(training, "torch", SimpleNamespace(cuda=cuda, device=torch.device))
        monkeypatch.setattr(training, "cuda_sleep", device.sleep)
        return device, ComputeTimer(torch.device("cuda", 0))

    return made


@pytest.mark.parametrize("host_s", [0.004, 0.009])
def test_a_host_that_takes_longer_than_the_device_is_left_out(host_s, looking):
    device, watch = looking(host_s=host_s, device_s=0.001)
    not_at_pace = 0
    for _ in range(40):
        device.step()
        not_at_pace += watch.stepped()
    assert watch.step_s == pytest.approx(0.001)
    assert not_at_pace == 2 * LOOKS
    assert device.slept == pytest.approx(LOOKS * 1.5 * host_s)


def test_steps_of_some_length_are_looked_at_once_and_long_ones_never(looking):
    for host_s, looks in ((0.05, 1), (0.07, 0)):
        device, watch = looking(host_s=host_s, device_s=0.001)
        for _ in range(40):
            device.step()
            watch.stepped()
        assert device.slept == pytest.approx(looks * 1.5 * host_s)
        assert device.slept <= MOST_S
        assert (watch.step_s is not None) == bool(looks)


def test_a_cpu_has_no_time_of_its_own():
    watch = ComputeTimer(torch.device("cpu"))
    assert not any(watch.stepped() for _ in range(10))
    assert watch.step_s is None
