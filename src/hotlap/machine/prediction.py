"""How long an update takes on a GPU, from its counted work and the GPU's published rates.

- The device takes the sum of arithmetic, traffic and launches: each at a measured share of the published rate, and at
  a measured time for each launch.
- A training as it is launches its operations one by one: the host takes a time for each and for each update. The
  longer of the two counts.
- At best, hotlap captures the update, computes in 16 bits, holds the data and fuses the optimizer: the device counts.

`python -m benchmarks.predictions` derives the factors from step times of one H200, and the errors: each work is
predicted with factors that come from the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from hotlap.machine.catalogue import GpuModel
from hotlap.monitor.work import Work


@dataclass(frozen=True, kw_only=True)
class Factors:
    """What a GPU reaches of its published rates in an update, and what the host takes to issue one."""

    arithmetic: float
    """Share of the published rate."""
    traffic: float
    """Share of the published bandwidth."""
    launch_s: float
    """Seconds of the device for a launch, beside the work."""
    issue_s: float = 0.0
    """Seconds of the host for an operation; 0 if the update is captured."""
    begin_s: float = 0.0
    """Seconds of the host for an update, beside its operations."""


@dataclass(frozen=True, kw_only=True)
class Error:
    """How far predictions were off."""

    low: float
    """The least measured time, as a multiple of the predicted one."""
    high: float
    """The largest."""
    works: int
    """How many works were measured."""

    @property
    def within(self) -> float:
        """The factor within which all of them were."""
        return max(self.high, 1 / self.low)


AS_IT_IS: Final = Factors(arithmetic=0.885, traffic=0.23, launch_s=3e-6, issue_s=27.4e-6, begin_s=2.05e-3)
AT_BEST: Final = Factors(arithmetic=0.211, traffic=0.791, launch_s=3.3e-6)
AS_IT_IS_ERROR: Final = Error(low=0.595, high=1.593, works=18)
AT_BEST_ERROR: Final = Error(low=0.768, high=1.262, works=8)
MEASURED: Final = frozenset({"h200"})
"""GPUs of the catalogue on which predictions were compared with measured times."""


def as_it_is_s(work: Work, gpu: GpuModel, factors: Factors = AS_IT_IS) -> float:
    """Seconds of an update launched operation by operation, in the number formats that the training asks for."""
    whole = replace(work, bytes=work.bytes + work.step_bytes, launches=work.operations)
    return max(factors.begin_s + work.operations * factors.issue_s, _device_s(whole, gpu, factors))


def at_best_s(work: Work, gpu: GpuModel, factors: Factors = AT_BEST) -> float:
    """Seconds of an update that hotlap aims at: captured, in `best_format`, with held data and a fused optimizer."""
    chosen = best_format(gpu)
    # What is in 16 bits already moves as many bytes.
    moved = min(work.bytes, work.narrow_bytes) if chosen != "fp32" else work.bytes
    fused = min(work.step_bytes, work.least_step_bytes)
    flops = {chosen: work.total_flops}
    return _device_s(replace(work, flops=flops, bytes=moved + fused, launches=work.launches + 1), gpu, factors)


def best_format(gpu: GpuModel) -> str:
    """The number format that hotlap aims at: bf16 in hardware, else fp16 on tensor cores, else fp32."""
    if gpu.bf16_flops is not None:
        return "bf16"
    return "fp16" if gpu.tensor_cores else "fp32"


def _device_s(work: Work, gpu: GpuModel, factors: Factors) -> float:
    arithmetic_s = sum(count / _rate(gpu, name) for name, count in work.flops.items()) / factors.arithmetic
    traffic_s = work.bytes / (factors.traffic * gpu.bandwidth_bytes_per_s)
    return arithmetic_s + traffic_s + work.launches * factors.launch_s


def _rate(gpu: GpuModel, name: str) -> float:
    """The published rate in a number format. A GPU computes in fp32 what it lacks."""
    known: Mapping[str, float | None] = {name: gpu.flops(name) for name in gpu.supports}
    return known.get(name) or gpu.fp32_flops
