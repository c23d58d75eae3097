"""The verdict on what bounds a run: from figures given, and from little trainings."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from hotlap import Rig
from hotlap.monitor.bound import BOUNDS, diagnose, least_traffic
from hotlap.monitor.calibration import Calibration
from hotlap.monitor.census import Census, census

MS = 1e-3
CPU = Calibration(
    matmul_flops={"fp32": 1e11}, copy_bytes=1e10, cache_bytes=1e6, pinned_bytes=None, pageable_bytes=None,
    launch_s=1e-6, sync_s=0.0,
)  # fmt: skip
GPU = Calibration(
    matmul_flops={"fp32": 5e13, "tf32": 4e14, "bf16": 8e14, "fp16": 8e14}, copy_bytes=4e12, cache_bytes=5e7,
    pinned_bytes=5e10, pageable_bytes=1e10, launch_s=4e-6, sync_s=5e-6,
)  # fmt: skip
SMALL = Census(operations=100, flops=10**6, bytes=10**6)


def on_cpu(**figures):
    return diagnose(**{"feed_s": 0.0, "issue_s": 1 * MS, "census": SMALL, "calibration": CPU, **figures})


def on_gpu(**figures):
    return diagnose(**{"feed_s": 0.0, "issue_s": 1 * MS, "census": SMALL, "calibration": GPU, **figures})


@pytest.mark.parametrize(
    ("bound", "diagnosis"),
    [
        ("feeding", on_cpu(step_s=4.4 * MS, feed_s=3.1 * MS)),
        ("launching", on_cpu(step_s=1 * MS, census=Census(operations=500, flops=10**6, bytes=10**6))),
        ("memory traffic", on_cpu(step_s=20 * MS, census=Census(operations=50, flops=10**6, bytes=10**8))),
        ("arithmetic", on_cpu(step_s=99 * MS, census=Census(operations=50, flops=9 * 10**9, bytes=10**8))),
        ("feeding", on_gpu(step_s=4.4 * MS, feed_s=3.1 * MS)),
        ("launching", on_gpu(step_s=1.05 * MS)),
        # The shorter of issuing and computing is lost to the wait.
        ("synchronising", on_gpu(step_s=2 * MS, waits=1)),
        # The host waits in the copy: for the copy itself, for the device, or not much beside its launches.
        ("pageable copies", on_gpu(step_s=10 * MS, issue_s=9.9 * MS, pageable_bytes=7.7e7)),
        # The device was measured to compute for less than the host waits: the copy is slower than the timed one.
        ("pageable copies", on_gpu(step_s=13 * MS, issue_s=12.9 * MS, pageable_bytes=5e7, busy_s=0.5 * MS)),
        ("memory traffic", on_gpu(step_s=13 * MS, issue_s=12.9 * MS, pageable_bytes=5e7, busy_s=8 * MS)),
        (
            "arithmetic",
            on_gpu(
                step_s=10 * MS,
                issue_s=9.9 * MS,
                pageable_bytes=1e6,
                census=Census(operations=100, flops=4 * 10**11, bytes=10**8),
            ),
        ),
        ("memory traffic", on_gpu(step_s=10 * MS, issue_s=9.9 * MS, pageable_bytes=1e6)),
        (
            "launching",
            on_gpu(
                step_s=10 * MS,
                issue_s=9.9 * MS,
                pageable_bytes=1e6,
                census=Census(operations=2500, flops=10**6, bytes=10**6),
            ),
        ),
        ("feeding", on_gpu(step_s=10 * MS, feed_s=7 * MS, issue_s=2.9 * MS, pageable_bytes=1e6)),
        ("synchronising", on_gpu(step_s=1.7 * MS, waits=2)),
        ("launching", on_gpu(step_s=1.1 * MS, waits=1)),
        ("feeding", on_gpu(step_s=10 * MS, feed_s=8 * MS, waits=1)),
        ("memory traffic", on_gpu(step_s=5 * MS, census=Census(operations=50, flops=10**11, bytes=10**10))),
        ("arithmetic", on_gpu(step_s=50 * MS, census=Census(operations=50, flops=2 * 10**12, bytes=10**10))),
        # In a faster format the same arithmetic weighs less.
        (
            "memory traffic",
            on_gpu(step_s=9 * MS, precision="bf16", census=Census(operations=50, flops=10**12, bytes=10**10)),
        ),
        # The device is waited for, however badly its kernels do.
        ("arithmetic", on_gpu(step_s=2 * MS, census=Census(operations=50, flops=10**9, bytes=10**6))),
        # A wait that costs little does not hide what bounds the rest.
        ("arithmetic", on_gpu(step_s=50 * MS, waits=1, census=Census(operations=9, flops=2 * 10**12, bytes=10**9))),
    ],
)
def test_every_bound_is_told_from_its_figures(bound, diagnosis):
    assert diagnosis.bound == bound
    assert tuple(diagnosis.shares) == BOUNDS
    assert all(0 <= share <= 1 for share in diagnosis.shares.values())
    assert diagnosis.line().startswith(f"bound by {bound}: ")


@pytest.mark.parametrize(
    ("line", "diagnosis"),
    [
        (
            "bound by feeding: bringing a batch takes 3.1 of 4.4 ms",
            on_cpu(step_s=4.4 * MS, feed_s=3.1 * MS),
        ),
        (
            "bound by launching: issuing 100 operations takes 900 µs of 1 ms",
            on_gpu(step_s=1 * MS, issue_s=0.9 * MS),
        ),
        (
            "bound by synchronising: 1 wait for the device in a step cost 1 of 2 ms",
            on_gpu(step_s=2 * MS, waits=1, calibration=GPU),
        ),
        (
            "bound by pageable copies: copying a batch from memory that is not pinned takes 7.7 of 10 ms",
            on_gpu(step_s=10 * MS, issue_s=9.9 * MS, pageable_bytes=7.7e7),
        ),
        (
            "bound by memory traffic: reading and writing what its operations touch takes about 2.5 of 5 ms",
            on_gpu(step_s=5 * MS, census=Census(operations=50, flops=10**11, bytes=10**10)),
        ),
        (
            "bound by arithmetic: its products and convolutions take about 40 of 50 ms",
            on_gpu(step_s=50 * MS, census=Census(operations=50, flops=2 * 10**12, bytes=10**10)),
        ),
    ],
)
def test_the_line_for_people_gives_the_time_it_takes(line, diagnosis):
    assert diagnosis.line() == line


def test_on_a_cpu_the_shares_add_up():
    for feed_s in (0.0, 0.3 * MS, 5 * MS):
        assert sum(on_cpu(step_s=1 * MS, feed_s=feed_s).shares.values()) == pytest.approx(1)


def test_a_host_that_waits_in_a_copy_from_pageable_memory_is_not_called_busy_with_launching():
    figures = {"step_s": 10 * MS, "issue_s": 9.9 * MS, "census": Census(operations=100, flops=4 * 10**11, bytes=10**8)}
    assert on_gpu(**figures).bound == "launching"
    found = on_gpu(**figures, pageable_bytes=1e6)
    assert found.shares["launching"] == pytest.approx(0.1)
    assert found.shares["arithmetic"] == pytest.approx(0.88, abs=0.01)


def test_on_a_cpu_nothing_is_copied_to_a_device():
    assert on_cpu(step_s=10 * MS, pageable_bytes=1e9).shares["pageable copies"] == 0


def test_the_floor_is_the_larger_of_arithmetic_and_traffic_in_each_precision():
    counted = Census(operations=1000, flops=10**12, bytes=10**11)
    floor = on_gpu(step_s=1.0, census=counted, least_bytes=2.01e10).floor_s
    # What the cache may hold, read and written, is not counted on.
    assert floor == {
        "fp32": pytest.approx(20 * MS),
        "tf32": pytest.approx(5 * MS),
        "bf16": pytest.approx(5 * MS),
        "fp16": pytest.approx(5 * MS),
        "launches": pytest.approx(4 * MS),
    }
    assert on_gpu(step_s=1.0, census=counted, least_bytes=9e7).floor_s["bf16"] == pytest.approx(1.25 * MS)


def test_traffic_is_no_floor_where_the_size_of_the_cache_is_not_known():
    blind = replace(GPU, cache_bytes=0.0)
    assert on_gpu(step_s=1.0, least_bytes=1e12, calibration=blind).floor_s["fp32"] == pytest.approx(1e6 / 5e13)


def test_a_step_a_little_faster_than_its_floor_lowers_it_and_one_much_faster_makes_it_void():
    both = replace(CPU, matmul_flops={"fp32": 1e11, "bf16": 4e11})
    counted = Census(operations=1, flops=10**9, bytes=1)  # 10 ms as calibrated
    lowered = on_cpu(step_s=9 * MS, census=counted, calibration=both).floor_s
    assert (lowered["fp32"], lowered["bf16"]) == (pytest.approx(9 * MS), pytest.approx(2.25 * MS))
    void = on_cpu(step_s=5 * MS, census=counted, calibration=both).floor_s
    assert (void["fp32"], void["bf16"]) == (0.0, 0.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"step_s": 0.0},
        {"step_s": float("nan")},
        {"feed_s": -1.0},
        {"waits": -1},
        {"least_bytes": float("inf")},
        {"pageable_bytes": -1.0},
    ],
)
def test_a_figure_that_is_no_time_or_count_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        on_cpu(**{"step_s": 1.0, **wrong})


def test_the_least_traffic_is_that_of_weights_gradients_state_and_batch():
    used, unused = nn.Linear(10, 10, bias=False), nn.Linear(10, 10)
    optimizer = torch.optim.SGD([*used.parameters(), *unused.parameters()], lr=0.1, momentum=0.9)
    batch = (torch.randn(5, 10), {"more": torch.zeros(3, dtype=torch.int64)})
    assert least_traffic(optimizer, batch) == 200 + 24
    used(batch[0]).sum().backward()
    optimizer.step()
    assert least_traffic(optimizer, batch) == 2 * 3 * 400 + 200 + 24
    assert least_traffic(optimizer) == 2 * 3 * 400


# --- little trainings --------------------------------------------------------------------------------


def diagnosed(model, data, *, batch, takes_s, feed_s=0.0):
    """A training of which an update is counted, and takes as long as `takes_s` says of what was counted."""
    rig = Rig(model, lambda p: torch.optim.SGD(p, lr=0.01), nn.CrossEntropyLoss(), device="cpu")
    windows = rig.feed(data, batch_size=batch, epochs=1)
    rig.step(next(windows))
    window = next(windows)
    counted = census(lambda: rig.step(window))
    step_s = feed_s + takes_s(counted)
    return on_cpu(
        step_s=step_s, feed_s=feed_s, issue_s=step_s, census=counted,
        least_bytes=least_traffic(rig.optimizer, window.pieces[0]),
    )  # fmt: skip


def launching_s(counted):
    return 1.2 * counted.operations * CPU.launch_s


def test_a_slow_dataset_is_bound_by_feeding():
    data = torch.randn(16, 4), torch.zeros(16, dtype=torch.int64)
    found = diagnosed(nn.Linear(4, 2), data, batch=8, takes_s=launching_s, feed_s=0.16)
    assert found.bound == "feeding"


def test_many_tiny_layers_are_bound_by_launching():
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(60)])
    data = torch.randn(8, 4), torch.zeros(8, dtype=torch.int64)
    found = diagnosed(model, data, batch=2, takes_s=launching_s)
    assert found.bound == "launching"
    assert found.operations > 300


def test_large_products_are_bound_by_arithmetic():
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024))
    data = torch.randn(4096, 1024), torch.zeros(4096, dtype=torch.int64)
    # Four products of those matrices forward and backward, and one between them, at the known rate.
    products_s = 5 * 2 * 1024**3 / CPU.matmul_flops["fp32"]
    found = diagnosed(model, data, batch=1024, takes_s=lambda counted: 1.5 * products_s)
    assert found.bound == "arithmetic"
    assert found.shares["arithmetic"] > 0.5
