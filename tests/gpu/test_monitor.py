"""What a GPU can do, what a step asks of it, and what bounds it: measured on a real one."""

import time

import pytest
import torch
from plain import class_data, parameters_of, twins
from torch import nn
from torch.utils.data import Dataset

from hotlap import Rig, machine
from hotlap.monitor.bound import diagnose, least_traffic
from hotlap.monitor.calibration import measure
from hotlap.monitor.census import census

DEVICE = "cuda"


@pytest.fixture(scope="module")
def rates():
    return measure(torch.device(DEVICE))


def test_every_figure_of_the_gpu_is_there_and_sensible(rates):
    facts = machine.dtype_facts(DEVICE)
    hardware = {name for name, fact in facts.items() if fact.support is machine.Support.HARDWARE}
    assert set(rates.matmul_flops) == hardware
    if "bf16" in hardware:
        assert rates.matmul_flops["bf16"] > 2 * rates.matmul_flops["fp32"]
    assert 1e10 < rates.copy_bytes < 1e14
    assert rates.cache_bytes > 0
    assert 1e8 < rates.pageable_bytes < 1e12
    assert 1e8 < rates.pinned_bytes < 1e12
    assert 1e-7 < rates.launch_s < 1e-3
    assert 1e-7 < rates.sync_s < 1e-2
    assert rates.queued


def test_measuring_leaves_the_gpus_generator_and_settings_as_they_are():
    torch.cuda.manual_seed(5)
    before, tf32 = torch.cuda.get_rng_state(), torch.backends.cuda.matmul.fp32_precision
    started = time.perf_counter()
    measure(torch.device(DEVICE))
    assert time.perf_counter() - started < 5  # it takes some tenths
    assert torch.equal(before, torch.cuda.get_rng_state())
    assert torch.backends.cuda.matmul.fp32_precision == tf32


def test_a_backward_pass_in_another_thread_is_counted():
    """On a GPU autograd runs in threads of its own."""
    counted = {}
    for device in ("cpu", DEVICE):
        model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 3))
        rig = Rig(model, lambda p: torch.optim.Adam(p), nn.CrossEntropyLoss(), device=device)
        first, second = rig.feed(class_data(32, inputs=20, dtype=torch.float32), batch_size=16, epochs=1)
        rig.step(first)
        counted[device] = census(lambda rig=rig, window=second: rig.step(window))
    assert counted[DEVICE].flops == counted["cpu"].flops == 2 * 16 * (2 * 20 * 50 + 3 * 50 * 3)
    assert 10 < counted[DEVICE].operations < 60
    weights = 4 * (20 * 50 + 50 + 50 * 3 + 3)
    assert counted[DEVICE].bytes > 10 * weights


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3)])
def test_recurrent_layers_of_cudnn_are_counted(kind, gates):
    layer = kind(6, 8, num_layers=2).to(DEVICE)
    x = torch.randn(5, 3, 6, device=DEVICE)
    forward = 2 * 15 * gates * 8 * ((6 + 8) + (8 + 8))
    assert census(lambda: layer(x)).flops == forward
    assert census(lambda: layer(x)[0].sum().backward()).flops == 3 * forward


def test_a_step_that_is_counted_is_a_step_like_any_other(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)

    def trained(model, counted):
        torch.cuda.manual_seed(7)
        rig = Rig(model, lambda p: torch.optim.Adam(p), nn.CrossEntropyLoss(), clip=1.0, device=DEVICE)
        for number, window in enumerate(rig.feed(data, batch_size=8, epochs=1)):
            if number in counted:
                assert census(lambda window=window: rig.step(window)).operations > 10
            else:
                rig.step(window)
        return parameters_of(model), torch.cuda.get_rng_state()

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 4, 5)), nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(),
        nn.Dropout(0.3), nn.Linear(120, 3),
    )  # fmt: skip
    data = class_data(64, inputs=20, dtype=torch.float32)
    one, other = twins(model)
    for plain, counted in zip(trained(one, []), trained(other, [1, 3]), strict=True):
        assert torch.equal(plain, counted)


class Slow(Dataset):
    def __len__(self):
        return 160

    def __getitem__(self, index):
        time.sleep(0.005)
        return torch.randn(16), index % 2


def diagnosed(model, data, rates, *, batch):
    """A training of 20 steps in blocks of 5; before it some are issued to an idle device, and one is counted.

    Of both times the least counts: whatever else runs on the machine comes and goes.
    """
    rig = Rig(model, lambda p: torch.optim.SGD(p, lr=0.01), nn.CrossEntropyLoss(), device=DEVICE)

    def windows():
        while True:
            yield from rig.feed(data, batch_size=batch, epochs=1)

    ahead = windows()
    for _ in range(3):
        rig.step(next(ahead))
    issued = []
    for _ in range(5):
        window = next(ahead)
        torch.cuda.synchronize()
        started = time.perf_counter()
        rig.step(window)
        issued.append(time.perf_counter() - started)
    counted = census(lambda: rig.step(window))
    torch.cuda.synchronize()
    blocks = []
    for _ in range(4):
        feed_s, started = 0.0, time.perf_counter()
        for _ in range(5):
            asked = time.perf_counter()
            window = next(ahead)
            feed_s += time.perf_counter() - asked
            rig.step(window)
        torch.cuda.synchronize()
        blocks.append(((time.perf_counter() - started) / 5, feed_s / 5))
    step_s, feed_s = min(blocks)
    return diagnose(
        step_s=step_s, feed_s=feed_s, issue_s=min(issued), census=counted, calibration=rates,
        least_bytes=least_traffic(rig.optimizer),
    )  # fmt: skip


def test_a_slow_dataset_is_bound_by_feeding(rates):
    assert diagnosed(nn.Linear(16, 2), Slow(), rates, batch=8).bound == "feeding"


def test_many_tiny_layers_are_bound_by_launching(rates):
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(100)])
    data = torch.randn(4096, 16), torch.zeros(4096, dtype=torch.int64)
    found = diagnosed(model, data, rates, batch=8)
    assert found.bound == "launching", found
    assert found.operations > 300


def test_large_products_are_bound_by_arithmetic(rates):
    # Little to bring, much to multiply.
    model = nn.Sequential(nn.Linear(64, 8192), nn.Linear(8192, 8192), nn.Linear(8192, 8192), nn.Linear(8192, 2))
    data = torch.randn(8192, 64), torch.zeros(8192, dtype=torch.int64)
    found = diagnosed(model, data, rates, batch=4096)
    assert found.bound == "arithmetic", found
    assert 0 < found.floor_s["bf16"] < found.floor_s["fp32"] <= found.step_s * 1.001
