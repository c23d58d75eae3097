"""One real kernel, its result checked: the only proof that a device can compute."""

from __future__ import annotations

import re
import time
import warnings
from functools import cache
from typing import TYPE_CHECKING, Final

from hotlap.machine.tf32 import Tf32

if TYPE_CHECKING:
    import torch

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
_ACCOUNT: Final = re.compile(r" GPU \d+ has a total capacity of ")


def run_kernel(device: torch.device | str, dtype: str) -> str | None:
    """Multiply two small matrices on the device; None if the result is right, else one line why not."""
    import torch

    number = getattr(torch, _TORCH_NAME[dtype])
    draw = torch.Generator().manual_seed(_SEED)
    left = torch.randn(_SIDE, _SIDE, generator=draw, dtype=torch.float64)
    right = torch.randn(_SIDE, _SIDE, generator=draw, dtype=torch.float64)
    try:
        # torch warns at length about a GPU it has no kernels for; the caller says it better.
        with warnings.catch_warnings(), Tf32(dtype == "tf32", convolutions=False), torch.no_grad():
            warnings.simplefilter("ignore")
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


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its kind where it has none; of a full GPU without torch's account of it."""
    lines = str(error).strip().splitlines()
    return _ACCOUNT.split(lines[0].strip())[0] if lines else type(error).__name__
