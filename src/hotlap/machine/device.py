"""Which device to train on, and which number formats it has: asked by everything above this room."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import TYPE_CHECKING

from hotlap.core.errors import MachineError
from hotlap.machine.detect import Gpu, Machine, detect
from hotlap.machine.dtypes import (
    DTYPES,
    DtypeFact,
    Support,
    on_cpu,
    on_cuda,
    paced,
    pretended,
    proof,
    proven,
    times_as_long,
)

if TYPE_CHECKING:
    import torch

Kernel = Callable[[str, str], str | None]
Pace = Callable[[str], float]


def choose_device(asked: str = "auto", *, require_gpu: bool = False, pretend: str | None = None) -> torch.device:
    """The device to train on: `auto` (first GPU that works, else the CPU), `cpu`, `cuda` or `cuda:N`.

    Under a pretended GPU, memory on the real one is capped to what the pretended one has.
    Raises MachineError where a GPU was asked for or required and none works.
    """
    machine = detect(pretend)
    name = pick(machine, asked, require_gpu=require_gpu, kernel=proof)
    import torch

    if machine.pretended is not None and name != "cpu":
        gpu = _numbered(machine, name)
        _cap_memory(gpu.index, gpu.usable_bytes, gpu.memory_bytes)
    return torch.device(name)


def pick(machine: Machine, asked: str, *, require_gpu: bool, kernel: Kernel) -> str:
    """The name of the device `asked` means on this machine; raises MachineError where it has none."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", asked):
        raise MachineError(f"unknown device {asked!r}; use auto, cpu, cuda or cuda:N")
    if asked == "cpu":
        if require_gpu:
            raise MachineError("a GPU is required and the device asked for is 'cpu': drop one of the two")
        return "cpu"
    if machine.torch is None:
        raise MachineError(f"torch cannot be imported: {machine.cuda_error}; install torch")
    demanded = require_gpu or asked != "auto"
    if ":" in asked and machine.gpus:
        candidates: tuple[Gpu, ...] = (_numbered(machine, asked),)
    else:
        candidates = machine.gpus
    first_failure: tuple[str, str] | None = None
    for gpu in candidates:
        error = kernel(gpu.device, "fp32")
        if error is None:
            return gpu.device
        first_failure = first_failure or why_kernel_failed(machine, gpu, error)
    if not demanded:
        return "cpu"
    what, do = first_failure or why_no_gpu(machine)
    demand = "a GPU is required" if require_gpu else f"{asked!r} was asked for"
    raise MachineError(f"{demand}, but {what}: {do}")


def dtype_facts(device: torch.device | str, pretend: str | None = None) -> Mapping[str, DtypeFact]:
    """How the device has fp32, tf32, bf16 and fp16, each proven by a kernel (once per process)."""
    return facts_on(detect(pretend), str(device), proof)


def dtype_fact(device: torch.device | str, dtype: str) -> DtypeFact:
    """As `dtype_facts`, of one format: on a GPU the first kernel of each takes a tenth of a second or so."""
    return facts_on(detect(), str(device), proof, (dtype,))[dtype]


def facts_on(machine: Machine, device: str, kernel: Kernel, dtypes: Collection[str] = DTYPES) -> dict[str, DtypeFact]:
    """The formats of one device of this machine, these at least, as the GPU it acts as has them."""
    model = machine.pretended
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise MachineError(f"unknown device {device!r}; use cpu, cuda or cuda:N")
    if kind == "cpu":
        return pretended_or(machine, cpu_facts(machine, kernel, dtypes) if model is None else {})
    gpu = _numbered(machine, device if ":" in device else "cuda:0")
    facts = _proven(gpu.device, on_cuda(gpu.capability), kernel, dtypes)
    return facts if model is None else pretended(facts, model.supports, model.name)


def pretended_or(machine: Machine, facts: dict[str, DtypeFact]) -> dict[str, DtypeFact]:
    """The CPU's formats, or where a GPU is pretended, that GPU's as the catalogue has them."""
    model = machine.pretended
    return facts if model is None else pretended(None, model.supports, model.name)


def cpu_facts(
    machine: Machine, kernel: Kernel, dtypes: Collection[str] = DTYPES, pace: Pace = times_as_long
) -> dict[str, DtypeFact]:
    """These formats of the CPU itself."""
    return paced(_proven("cpu", on_cpu(machine.cpu.flags or _torch_cpu_flags()), kernel, dtypes), pace)


def why_no_gpu(machine: Machine) -> tuple[str, str]:
    """Why torch sees no GPU, and what to do about it."""
    here = f"the {_names(machine.hidden_gpus)} that is here" if machine.hidden_gpus else ""
    if machine.hidden_on_purpose:
        value = (machine.visible_devices or "")[:60]
        return (
            f"CUDA_VISIBLE_DEVICES={value!r} hides {here or 'every GPU'}",
            "unset it, or name the GPU in it",
        )
    if machine.cuda is None:
        if here:
            return (
                f"torch {machine.torch} is a CPU build and cannot use {here}",
                "install a CUDA build of torch (https://pytorch.org/get-started/locally/)",
            )
        return (
            f"there is no NVIDIA GPU here (and torch {machine.torch} is a CPU build)",
            "use a machine with a GPU and a CUDA build of torch, or train on the CPU",
        )
    reason = machine.cuda_error or "torch gives no reason"
    # torch's own words for "there is none"; any other error means that something is broken.
    plain = machine.cuda_error is None or re.search(r"no (nvidia|cuda)", machine.cuda_error, re.IGNORECASE)
    if here or not plain:
        return (
            f"torch cannot use {here or 'CUDA'}: {reason}",
            f"match driver and torch: driver {machine.driver or 'unknown'} runs CUDA up to "
            f"{machine.driver_cuda or 'unknown'}, torch {machine.torch} was built for CUDA {machine.cuda}",
        )
    return "there is no NVIDIA GPU here", "use a machine with one, or train on the CPU"


def why_kernel_failed(machine: Machine, gpu: Gpu, error: str) -> tuple[str, str]:
    """What a failed kernel means, and what to do about it."""
    if "no kernel image" in error.lower():
        built = " ".join(machine.architectures) or "unknown architectures"
        return (
            f"torch {machine.torch} has no kernels for the {gpu.name} ({gpu.sm}), only for {built}",
            f"use another GPU (Turing or later), or a torch build that lists {gpu.sm}: the builds for "
            "CUDA 12.6 have kernels from sm_50 on",
        )
    if "out of memory" in error.lower():
        return f"the memory of the {gpu.name} is full", "end the other processes on it (see nvidia-smi)"
    return (
        f"a kernel on the {gpu.name} failed: {error}",
        "restart the process; if it stays, the driver or the machine",
    )


def _names(names: tuple[str, ...]) -> str:
    counts = {name: names.count(name) for name in names}
    return " and ".join(name if n == 1 else f"{n} x {name}" for name, n in counts.items())


def _numbered(machine: Machine, name: str) -> Gpu:
    index = int(name.partition(":")[2])
    for gpu in machine.gpus:
        if gpu.index == index:
            return gpu
    seen = ", ".join(gpu.device for gpu in machine.gpus) or "none"
    raise MachineError(f"there is no {name}; GPUs torch can see: {seen}")


def _proven(
    device: str, design: Mapping[str, tuple[Support, str]], kernel: Kernel, dtypes: Collection[str]
) -> dict[str, DtypeFact]:
    asked = {name: design[name] for name in dtypes}
    ran = {name: kernel(device, name) for name, (support, _) in asked.items() if support is not Support.ABSENT}
    return proven(asked, ran)


def _torch_cpu_flags() -> frozenset[str]:
    """torch's own query, for systems without /proc/cpuinfo."""
    import torch

    ask = getattr(torch.cpu, "get_capabilities", None)
    return frozenset(name for name, value in ask().items() if value is True) if ask else frozenset()


@cache
def _cap_memory(index: int, usable_bytes: int, total_bytes: int) -> None:
    """Let torch take no more of this GPU than the pretended one has; once per process and size."""
    import torch

    torch.cuda.set_per_process_memory_fraction(min(1.0, usable_bytes / total_bytes), index)
