"""Which number formats a device has, by design and as a kernel proves it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Final

from hotlap.core.errors import first_line
from hotlap.core.warning_filters import filtered
from hotlap.machine.tf32 import Tf32

if TYPE_CHECKING:
    import torch


DTYPES: Final = ("fp32", "tf32", "bf16", "fp16")
"""The formats hotlap may train in, in the order they are shown."""

MUCH_LONGER: Final = 3.0
"""torch makes no use of a format in which a small product takes so many times as long as in fp32; noise is smaller."""

# /proc/cpuinfo of x86 and Arm, and the keys of torch.cpu.get_capabilities().
_CPU_BF16: Final = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})
_CPU_FP16: Final = frozenset({"avx512_fp16", "amx_fp16", "fphp", "asimdhp", "fp16_arith"})


class Support(StrEnum):
    """How a device has a number format."""

    HARDWARE = "hardware"
    EMULATED = "emulated"
    ABSENT = "absent"


_RANK: Final = {Support.ABSENT: 0, Support.EMULATED: 1, Support.HARDWARE: 2}


@dataclass(frozen=True, kw_only=True)
class DtypeFact:
    """One format on one device."""

    support: Support
    reason: str
    """Why, in a few words; the first line of the error where a kernel failed."""
    kernel: str
    """`ran`, `failed`, or `not run` (absent by design, or only pretended)."""


def on_cuda(capability: tuple[int, int]) -> dict[str, tuple[Support, str]]:
    """What NVIDIA hardware of this compute capability has, by design.

    `torch.cuda.is_bf16_supported()` does not help: it returns True on every GPU that can hold a bf16 tensor.
    """
    sm = f"compute capability {capability[0]}.{capability[1]}"
    if capability >= (8, 0):
        bf16 = (Support.HARDWARE, sm)
    elif capability >= (7, 0):
        bf16 = (Support.EMULATED, f"{sm}; bf16 arithmetic begins with 8.0")
    else:
        # cuBLAS refuses bf16 products on Pascal (pytorch issue 57773).
        bf16 = (Support.ABSENT, f"{sm}; cuBLAS has no bf16 products below 7.0")
    tf32 = (Support.HARDWARE, sm) if capability >= (8, 0) else (Support.ABSENT, f"{sm}; TF32 begins with 8.0 (Ampere)")
    if capability >= (7, 0):
        fp16 = (Support.HARDWARE, f"{sm}, tensor cores")
    elif capability in ((5, 3), (6, 0), (6, 2)):
        fp16 = (Support.HARDWARE, f"{sm}, no tensor cores")
    else:
        fp16 = (Support.EMULATED, f"{sm}; fp16 arithmetic runs at a fraction of the fp32 rate")
    return {"fp32": (Support.HARDWARE, sm), "tf32": tf32, "bf16": bf16, "fp16": fp16}


def on_cpu(flags: Collection[str]) -> dict[str, tuple[Support, str]]:
    """What a CPU with these instruction flags has, by design."""

    def native(wanted: frozenset[str]) -> tuple[Support, str]:
        found = sorted(wanted & set(flags))
        if found:
            return Support.HARDWARE, ", ".join(found)
        return Support.EMULATED, "this CPU has no instructions for it: converted to fp32 and back"

    return {
        "fp32": (Support.HARDWARE, "every CPU"),
        "tf32": (Support.ABSENT, "a format of NVIDIA GPUs"),
        "bf16": native(_CPU_BF16),
        "fp16": native(_CPU_FP16),
    }


def proven(design: Mapping[str, tuple[Support, str]], kernels: Mapping[str, str | None]) -> dict[str, DtypeFact]:
    """The design's promise, kept only where a kernel ran.

    `kernels` maps a format to None where its kernel ran and to the error's first line where not.
    """
    facts = {}
    for name, (support, reason) in design.items():
        if support is Support.ABSENT or name not in kernels:
            facts[name] = DtypeFact(support=support, reason=reason, kernel="not run")
            continue
        error = kernels[name]
        facts[name] = (
            DtypeFact(support=support, reason=reason, kernel="ran")
            if error is None
            else DtypeFact(support=Support.ABSENT, reason=error, kernel="failed")
        )
    return facts


def paced(facts: Mapping[str, DtypeFact], times_as_long: Callable[[str], float]) -> dict[str, DtypeFact]:
    """What is left of a CPU's `facts` where torch makes no use of its instructions, as of fp16 on many an Arm CPU."""
    found = dict(facts)
    for name, fact in facts.items():
        if name != "fp32" and fact.support is Support.HARDWARE and (times := times_as_long(name)) > MUCH_LONGER:
            reason = f"{fact.reason}, of which torch makes no use: a product takes {times:.0f} times as long as in fp32"
            found[name] = replace(fact, support=Support.EMULATED, reason=reason)
    return found


def pretended(facts: Mapping[str, DtypeFact] | None, model: Mapping[str, Support], name: str) -> dict[str, DtypeFact]:
    """What is left of `facts` on a machine that acts as the GPU `name`: never more than is here.

    Without `facts` (no GPU here) the catalogue alone answers.
    """
    acted = {}
    for dtype, support in model.items():
        real = facts.get(dtype) if facts is not None else None
        if real is not None and _RANK[real.support] <= _RANK[support]:
            acted[dtype] = real
        else:
            kernel = real.kernel if real is not None else "not run"
            acted[dtype] = DtypeFact(support=support, reason=f"acting as {name}", kernel=kernel)
    return acted


# --- the kernel that proves it ---------------------------------------------------------------------------


_SIDE: Final = 128
_SEED: Final = 20240229
_LAPS: Final = 4
_ENOUGH_S: Final = 0.02

# Relative error of the whole product. Wide enough that fp32 passes where a variable forces TF32 on
# (that is not a broken kernel), narrow enough that a wrong or skipped kernel never does.
_TOLERANCE: Final = {"fp64": 1e-9, "fp32": 3e-3, "tf32": 3e-3, "fp16": 5e-3, "bf16": 3e-2}
_TORCH_NAME: Final = {
    "fp64": "float64",
    "fp32": "float32",
    "tf32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
}


def run_kernel(device: torch.device | str, dtype: str) -> str | None:
    """Multiply two small matrices on the device; None if the result is right, else one line why not."""
    import torch

    number = getattr(torch, _TORCH_NAME[dtype])
    draw = torch.Generator().manual_seed(_SEED)
    left = torch.randn(_SIDE, _SIDE, generator=draw, dtype=torch.float64)
    right = torch.randn(_SIDE, _SIDE, generator=draw, dtype=torch.float64)
    try:
        # torch warns at length about a GPU without kernels; the caller does so in a line.
        with filtered(), Tf32(dtype == "tf32", convolutions=False), torch.no_grad():
            product = left.to(device, number) @ right.to(device, number)
            # Coming back to the host waits for the kernel: errors of the launch surface here.
            result = product.to("cpu", torch.float64)
    except Exception as error:
        return first_line(error)
    truth = left @ right
    off = float((result - truth).norm() / truth.norm())
    if off <= _TOLERANCE[dtype]:
        return None
    return f"the kernel ran but its result is wrong (relative error {off:.2g})"


@cache
def proof(device: str, dtype: str) -> str | None:
    """`run_kernel`, once per process for each device and format."""
    return run_kernel(device, dtype)


@cache
def times_as_long(dtype: str) -> float:
    """How many times as long as in fp32 a small product takes on the CPU, both at their fastest; once per process."""
    import torch

    def fastest_s(name: str) -> float:
        square = torch.ones(_SIDE, _SIDE, dtype=getattr(torch, _TORCH_NAME[name]))
        laps: list[float] = []
        while len(laps) < 2 or (len(laps) < _LAPS and sum(laps) < _ENOUGH_S):
            began = time.perf_counter()
            torch.mm(square, square)
            laps.append(time.perf_counter() - began)
        return min(laps)

    with torch.no_grad():
        return fastest_s(dtype) / fastest_s("fp32")
