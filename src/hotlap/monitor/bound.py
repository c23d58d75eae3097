"""What bounds a step, from figures measured and counted: the names are in `BOUNDS`. Also how fast it could get."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hotlap.core.torch_private import tree_leaves
from hotlap.core.units import show_seconds
from hotlap.monitor.calibration import Calibration
from hotlap.monitor.census import Census

BOUNDS = ("feeding", "pageable copies", "launching", "synchronising", "memory traffic", "arithmetic")
HOST_BUSY = 0.8
"""If the host works for a smaller share of a step and never waits, the device is the bottleneck."""
ISSUING = 2.5
"""How many times `Calibration.launch_s` an operation of a model takes the host at most, with Python and autograd."""
UNCACHED = 4.0
"""How many times as long as the timed copy one from memory that no cache holds may take."""
SLACK = 1.25
"""How much faster than its floor a step may be, since its products may suit the device better than the timed one.
Beyond it, the machine was busy during calibration, or the step runs in another precision than assumed."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What bounds a run, and the figures behind it."""

    bound: str
    """One of BOUNDS."""
    shares: Mapping[str, float]
    """Shares of a step, 0 to 1, by the names of BOUNDS; rough. On a GPU they overlap, on a CPU they add up to 1."""
    floor_s: Mapping[str, float]
    """For each precision the least seconds of a step on this device, 0 if unknown; under `launches` the least seconds
    to issue its operations one by one."""
    step_s: float
    operations: int
    waits: float
    arithmetic_s: Mapping[str, float] = field(default_factory=dict)
    """For each precision the seconds that its products and convolutions take about."""
    traffic_s: float = 0.0
    """Seconds that reading and writing what its operations touch takes about."""
    flops: int = 0
    """Floating-point operations of a step."""

    def line(self) -> str:
        """The bottleneck in one line."""
        causes = {
            "feeding": "bringing a batch takes",
            "pageable copies": "copying a batch from memory that is not pinned takes",
            "launching": f"issuing {self.operations:,} operation{'' if self.operations == 1 else 's'} takes",
            "synchronising": f"{self.waits:g} wait{'' if self.waits == 1 else 's'} for the device in a step cost",
            "memory traffic": "reading and writing what its operations touch takes about",
            "arithmetic": "its products and convolutions take about",
        }
        return f"bound by {self.bound}: {causes[self.bound]} {self._time()}"

    def _time(self) -> str:
        part, whole = show_seconds(self.shares[self.bound] * self.step_s), show_seconds(self.step_s)
        (number, *unit), (_, *same) = part.split(), whole.split()
        return f"{number if unit == same else part} of {whole}"


def diagnose(
    *,
    step_s: float,
    feed_s: float,
    issue_s: float,
    census: Census,
    calibration: Calibration,
    waits: float = 0,
    precision: str = "fp32",
    least_bytes: float = 0,
    pageable_bytes: float = 0,
    busy_s: float | None = None,
) -> Diagnosis:
    """Find what bounds a run, from measured seconds per step and from what a step asks of the device.

    `feed_s`: seconds that the host waited for the next batch. `issue_s`: seconds to issue a step to an idle device,
    without waiting for it. `waits`: how often a step waits for the device. `least_bytes`: traffic that no cache or
    fusion avoids, as `least_traffic` counts it. `pageable_bytes`: what a step copies to the device from memory that is
    not pinned. Such a copy waits until the device has come to it, so `issue_s` then holds more than issuing. `busy_s`:
    seconds that the device computes for a step, where that was measured. Raises ValueError if a figure is not a valid
    time or count.

    The floors use the rate of a large product. They assume that every product is in that precision, and that the
    device's cache saves all traffic that it can hold, read and written. They ignore kernels that need less arithmetic
    than the definition, as some convolutions do.
    """
    figures = {"step_s": step_s, "feed_s": feed_s, "issue_s": issue_s, "waits": waits}
    figures |= {"least_bytes": least_bytes, "pageable_bytes": pageable_bytes}
    for name, value in figures.items():
        if not math.isfinite(value) or value < 0 or (name == "step_s" and value == 0):
            raise ValueError(f"{name}={value!r} must be finite and not negative, and a step takes time")
    rates = calibration.matmul_flops
    arithmetic_s = {name: census.flops / rate for name, rate in rates.items()}
    traffic_s = census.bytes / calibration.copy_bytes
    # The device computes formats that it lacks in fp32.
    device = {
        "memory traffic": traffic_s / step_s,
        "arithmetic": arithmetic_s.get(precision, arithmetic_s["fp32"]) / step_s,
    }
    launches_s = census.operations * calibration.launch_s
    feeding = min(1.0, feed_s / step_s)
    if calibration.queued and pageable_bytes and calibration.pageable_bytes:
        copy_s = pageable_bytes / calibration.pageable_bytes
        if busy_s is not None:  # memory that no cache holds copies slower than the memory that was timed
            copy_s = max(copy_s, min(UNCACHED * copy_s, issue_s - ISSUING * launches_s - busy_s))
        copying = min(issue_s, copy_s) / step_s
        shares, bound = _with_copies(feeding, copying, issue_s / step_s, ISSUING * launches_s / step_s, device)
    elif calibration.queued:
        issuing = min(1.0, issue_s / step_s)
        shares, bound = _beside_a_queue(feeding, issuing, device, waits, waits * calibration.sync_s / step_s)
    else:
        shares, bound = _one_after_the_other(feeding, launches_s / step_s, device)
    floor = {name: max(seconds, _unspared_s(least_bytes, calibration)) for name, seconds in arithmetic_s.items()}
    beyond = floor.get(precision, 0.0) / step_s
    if beyond > 1:  # a measured step overrules the calculation
        floor = {name: seconds / beyond if beyond <= SLACK else 0.0 for name, seconds in floor.items()}
    return Diagnosis(
        bound=bound,
        shares={name: shares[name] for name in BOUNDS},
        floor_s={**floor, "launches": launches_s},
        step_s=step_s,
        operations=census.operations,
        waits=waits,
        arithmetic_s=arithmetic_s,
        traffic_s=traffic_s,
        flops=census.flops,
    )


def least_traffic(optimizer: Optimizer, batch: Any = None) -> int:
    """Bytes that an update has to move, counted after a step.

    Even with everything fused, weights and optimizer state are read and written, gradients are written and read, and
    the batch is read.
    """
    moved = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None or parameter.grad.is_sparse:  # unused, or a few rows only
                continue
            state = [value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, Tensor)]
            moved += 2 * sum(tensor.nbytes for tensor in (parameter, parameter.grad, *state))
    return moved + sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def _beside_a_queue(
    feeding: float, issuing: float, device: Mapping[str, float], waits: float, waiting: float
) -> tuple[dict[str, float], str]:
    """On a GPU, which works while the host goes on, unless the host waits for it."""
    shares = {"feeding": feeding, "pageable copies": 0.0, "launching": issuing, "synchronising": 0.0}
    shares |= {name: min(1.0, share) for name, share in device.items()}
    if waits:
        # While the host issues operations, the device has run dry. Without waits the shorter of the two would be
        # hidden.
        shares["synchronising"] = min(1.0, min(issuing, max(0.0, 1 - feeding - issuing)) + waiting)
    elif feeding + issuing < HOST_BUSY:
        return shares, max(device, key=lambda name: device[name])
    # A lost overlap can cost half of a step at most, so that share counts double.
    weighed = {name: share * (2 if name == "synchronising" else 1) for name, share in shares.items()}
    return shares, max(weighed, key=lambda name: weighed[name])


def _with_copies(
    feeding: float, copying: float, issuing: float, most_issuing: float, device: Mapping[str, float]
) -> tuple[dict[str, float], str]:
    """On a GPU whose host copies from pageable memory, and waits in each copy for all work before it.

    What it takes beyond the copy and its operations is that wait: the device computes for at least as long.
    """
    launching = min(issuing - copying, most_issuing)
    waiting = min(1.0, issuing - copying - launching)
    shares = {"feeding": feeding, "pageable copies": copying, "launching": min(1.0, launching), "synchronising": 0.0}
    shares |= {name: min(1.0, share) for name, share in device.items()}
    # However badly its kernels do, the device is waited for.
    busiest = max(device, key=lambda name: device[name])
    weighed = shares | {busiest: max(shares[busiest], waiting)}
    bound = max(weighed, key=lambda name: weighed[name])
    return shares | {busiest: weighed[busiest]}, bound


def _one_after_the_other(feeding: float, launching: float, device: Mapping[str, float]) -> tuple[dict[str, float], str]:
    """On a CPU, which does one thing at a time: the time besides feeding is split in proportion to the estimates."""
    work = {"launching": launching, **device}
    whole = sum(work.values()) or 1.0
    shares = {"feeding": feeding, "pageable copies": 0.0, "synchronising": 0.0}
    shares |= {name: (1 - feeding) * share / whole for name, share in work.items()}
    return shares, max(shares, key=lambda name: shares[name])


def _unspared_s(least_bytes: float, calibration: Calibration) -> float:
    """Seconds of traffic that the cache cannot avoid; 0 if the cache's size is unknown."""
    if not calibration.cache_bytes:
        return 0.0
    return max(0.0, least_bytes - 2 * calibration.cache_bytes) / calibration.copy_bytes
