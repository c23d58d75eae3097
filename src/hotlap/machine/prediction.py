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

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from hotlap.machine.catalogue import GpuModel


@dataclass(frozen=True, kw_only=True)
class Work:
    """What an update asks of a GPU. Raises ValueError if a figure is negative."""

    operations: float
    """That the host issues, the optimizer's included."""
    launches: float
    """Kernels that run one after the other outside of the optimizer: an operation, or a time step of a recurrent
    layer."""
    flops: Mapping[str, float]
    """Floating-point operations of products, by the number format that a GPU computes them in by torch's switches."""
    bytes: float
    """Read and written outside of the optimizer."""
    narrow_bytes: float
    """The same if each number took 16 bits."""
    step_bytes: float = 0.0
    """Read and written by the optimizer."""
    least_step_bytes: float = 0.0
    """What a fused optimizer has to read and write."""
    unfused: bool = False
    """Whether recurrent layers ran in many small operations, as some do on a CPU. A GPU takes fewer."""

    def __post_init__(self) -> None:
        figures = {**self.to_dict(), **self.flops}
        figures.pop("flops")
        for name, value in figures.items():
            if not value >= 0:
                raise ValueError(f"{name}={value!r} must be a number and not negative")

    @property
    def total_flops(self) -> float:
        """In all formats."""
        return sum(self.flops.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "flops": dict(self.flops)}

    @property
    def figures(self) -> dict[str, float]:
        """Plain numbers for an entry of the ledger, which `work_in` reads."""
        named = {name: float(value) for name, value in self.to_dict().items() if name != "flops"}
        return {f"work_{name}": value for name, value in (named | self._flops_by_name).items()}

    @property
    def _flops_by_name(self) -> dict[str, float]:
        return {f"flops_{name}": count for name, count in self.flops.items()}


def work_in(figures: Mapping[str, float]) -> Work | None:
    """The work among the figures of an entry; None if there is none, or they are no work."""
    named = {name.removeprefix("work_"): value for name, value in figures.items() if name.startswith("work_")}
    flops = {name.removeprefix("flops_"): named.pop(name) for name in list(named) if name.startswith("flops_")}
    if "operations" not in named or not all(map(math.isfinite, (*named.values(), *flops.values()))):
        return None
    try:
        return Work(flops=flops, unfused=bool(named.pop("unfused", 0.0)), **named)
    except (TypeError, ValueError):
        return None


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
