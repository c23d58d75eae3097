"""A small catalogue of GPUs: what each has, at which rates, and where the figures come from.

Rates are dense (a datasheet's "with sparsity" figure is halved) and, for fp16, with fp32
accumulation, which is what training uses; GeForce cards run that at half their headline rate.
Where a card comes in several forms, the one people meet in clouds is listed and named.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final

from hotlap.core.errors import MachineError, did_you_mean
from hotlap.core.units import GIB, MIB
from hotlap.machine.dtypes import Support, on_cuda

TFLOPS: Final = 1e12
GB_PER_S: Final = 1e9
LEAST_CAPABILITY: Final = (7, 5)
"""The oldest compute capability that default builds of torch have kernels for."""


@dataclass(frozen=True, kw_only=True)
class GpuModel:
    """One kind of GPU, as published."""

    key: str
    name: str
    architecture: str
    capability: tuple[int, int]
    memory_bytes: int
    """On the box."""
    usable_bytes: int
    """The total CUDA reports on a real card, after ECC and the driver; varies a little by driver."""
    bandwidth_bytes_per_s: float
    fp32_flops: float
    tf32_flops: float | None
    bf16_flops: float | None
    fp16_flops: float
    tensor_cores: bool
    chip: str
    """Words that stand in the name CUDA gives the card."""
    not_these: tuple[str, ...]
    """Words in the names of sister cards that have other figures."""
    source: str

    @property
    def has_kernels(self) -> bool:
        """Whether default builds of torch have kernels for it."""
        return self.capability >= LEAST_CAPABILITY

    @cached_property
    def supports(self) -> Mapping[str, Support]:
        """Each format, as the architecture has it."""
        return MappingProxyType({name: fact[0] for name, fact in on_cuda(self.capability).items()})

    def flops(self, dtype: str) -> float | None:
        """Floating-point operations per second in that format; None where the hardware lacks it."""
        rates = {
            "fp32": self.fp32_flops,
            "tf32": self.tf32_flops,
            "bf16": self.bf16_flops,
            "fp16": self.fp16_flops,
        }
        return rates[dtype]

    def as_json(self) -> dict[str, Any]:
        """Plain values under stable keys."""
        return {
            "key": self.key,
            "name": self.name,
            "architecture": self.architecture,
            "compute_capability": f"{self.capability[0]}.{self.capability[1]}",
            "memory_bytes": self.memory_bytes,
            "usable_bytes": self.usable_bytes,
            "bandwidth_bytes_per_s": self.bandwidth_bytes_per_s,
            "flops": {name: self.flops(name) for name in self.supports},
            "dtypes": {name: str(support) for name, support in self.supports.items()},
            "tensor_cores": self.tensor_cores,
            "source": self.source,
        }


def _gpu(
    key: str,
    name: str,
    architecture: str,
    capability: tuple[int, int],
    *,
    gib: int,
    usable_mib: int,
    gb_per_s: float,
    fp32: float,
    tf32: float | None,
    half: float,
    chip: str,
    not_these: tuple[str, ...] = (),
    source: str,
) -> GpuModel:
    """A row of the catalogue, in the units of the datasheets."""
    ampere = capability >= (8, 0)
    return GpuModel(
        key=key,
        name=name,
        architecture=architecture,
        capability=capability,
        memory_bytes=gib * GIB,
        usable_bytes=usable_mib * MIB,
        bandwidth_bytes_per_s=gb_per_s * GB_PER_S,
        fp32_flops=fp32 * TFLOPS,
        tf32_flops=None if tf32 is None else tf32 * TFLOPS,
        bf16_flops=half * TFLOPS if ampere else None,
        fp16_flops=half * TFLOPS,
        tensor_cores=capability >= (7, 0),
        chip=chip,
        not_these=not_these,
        source=source,
    )


# fmt: off
CATALOGUE: Final[tuple[GpuModel, ...]] = (
    _gpu("p100", "Tesla P100 PCIe 16 GB", "Pascal", (6, 0), gib=16, usable_mib=16280, gb_per_s=732,
         fp32=9.3, tf32=None, half=18.7, chip="p100", not_these=("sxm2",),
         source="NVIDIA Tesla P100 PCIe datasheet, rates from memory; fp16 on the ordinary cores, no tensor cores"),
    _gpu("v100", "Tesla V100 SXM2 16 GB", "Volta", (7, 0), gib=16, usable_mib=16160, gb_per_s=900,
         fp32=15.7, tf32=None, half=125, chip="v100", not_these=("pcie",),
         source="NVIDIA V100 datasheet, SXM2"),
    _gpu("t4", "Tesla T4", "Turing", (7, 5), gib=16, usable_mib=14930, gb_per_s=320,
         fp32=8.1, tf32=None, half=65, chip="t4",
         source="NVIDIA T4 datasheet and product brief"),
    _gpu("a10", "A10", "Ampere", (8, 6), gib=24, usable_mib=22589, gb_per_s=600,
         fp32=31.2, tf32=62.5, half=125, chip="a10",
         source="NVIDIA A10 datasheet, rates from memory"),
    _gpu("rtx3080", "GeForce RTX 3080 10 GB", "Ampere", (8, 6), gib=10, usable_mib=10015, gb_per_s=760,
         fp32=29.8, tf32=29.8, half=59.5, chip="rtx 3080",
         source="NVIDIA GA102 whitepaper v2, appendix A, rates from memory"),
    _gpu("rtx3090", "GeForce RTX 3090", "Ampere", (8, 6), gib=24, usable_mib=24259, gb_per_s=936,
         fp32=35.6, tf32=35.6, half=71, chip="rtx 3090", not_these=("ti",),
         source="NVIDIA GA102 whitepaper v2, appendix A"),
    _gpu("a100-40", "A100 SXM4 40 GB", "Ampere", (8, 0), gib=40, usable_mib=40536, gb_per_s=1555,
         fp32=19.5, tf32=156, half=312, chip="a100",
         source="NVIDIA A100 datasheet, SXM4 40 GB"),
    _gpu("a100-80", "A100 SXM4 80 GB", "Ampere", (8, 0), gib=80, usable_mib=81050, gb_per_s=2039,
         fp32=19.5, tf32=156, half=312, chip="a100",
         source="NVIDIA A100 datasheet, SXM4 80 GB"),
    _gpu("l4", "L4", "Ada", (8, 9), gib=24, usable_mib=22558, gb_per_s=300,
         fp32=30.3, tf32=60, half=121, chip="l4",
         source="NVIDIA L4 datasheet, its figures with sparsity halved"),
    _gpu("rtx4090", "GeForce RTX 4090", "Ada", (8, 9), gib=24, usable_mib=24210, gb_per_s=1008,
         fp32=82.6, tf32=82.6, half=165.2, chip="rtx 4090", not_these=("d",),
         source="NVIDIA Ada whitepaper v2, appendix A"),
    _gpu("h100", "H100 SXM5 80 GB", "Hopper", (9, 0), gib=80, usable_mib=81089, gb_per_s=3350,
         fp32=67, tf32=494.5, half=989.5, chip="h100", not_these=("pcie", "nvl"),
         source="NVIDIA H100 datasheet, SXM5, its figures with sparsity halved"),
    _gpu("h200", "H200 SXM 141 GB", "Hopper", (9, 0), gib=141, usable_mib=143156, gb_per_s=4800,
         fp32=67, tf32=494.5, half=989.5, chip="h200",
         source="NVIDIA H200 datasheet, SXM, its figures with sparsity halved"),
)
# fmt: on

_NOISE: Final = re.compile(r"nvidia|tesla|geforce|quadro|sxm\d?|pcie|hbm\d?\w?")


def find_gpu(asked: str) -> GpuModel:
    """The catalogue's entry for a name such as `T4`, `rtx 4090` or `A100-80GB`.

    Raises MachineError where the name is unknown, or fits more than one entry.
    """
    words = [w for w in re.split(r"[^a-z0-9]+", asked.lower()) if w and not _NOISE.fullmatch(w)]
    keys = {model.key.replace("-", ""): model for model in CATALOGUE}
    wanted = "".join(words).removesuffix("gb")
    # `4090` is plainly the RTX 4090, and `T4 16GB` plainly the T4; a V100 of 32 GB is not listed.
    for spelling in (wanted, f"rtx{wanted}"):
        if spelling in keys:
            return keys[spelling]
    for key, model in keys.items():
        if "".join(words) == f"{key}{model.memory_bytes // GIB}gb":
            return model
    fits = [model.key for key, model in keys.items() if len(wanted) > 2 and key.startswith(wanted)]
    if len(fits) > 1:
        raise MachineError(f"{asked!r} could be more than one GPU; say {' or '.join(fits)}")
    raise MachineError(f"unknown GPU {asked!r}{did_you_mean(asked, [m.key for m in CATALOGUE])}")


def recognise(device_name: str, memory_bytes: int) -> GpuModel | None:
    """The catalogue's entry for a card as CUDA names it; None where it is not listed.

    A card of the same chip with another amount of memory (V100 32 GB, RTX 3080 12 GB) is not it.
    """
    words = set(re.split(r"[^a-z0-9]+", device_name.lower()))
    for model in CATALOGUE:
        same_memory = 0.9 <= memory_bytes / model.usable_bytes <= 1.1
        if same_memory and words.issuperset(model.chip.split()) and words.isdisjoint(model.not_these):
            return model
    return None
