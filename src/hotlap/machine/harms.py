"""The variables that harm training by their value alone: one entry for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from hotlap.machine.problems import Severity


@dataclass(frozen=True, kw_only=True)
class Harm:
    """A variable that harms when its value passes `when`."""

    name: str
    when: Callable[[str], bool]
    severity: Severity
    costs: str
    do: str = "unset it"


def _on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "no", "off")


def _is(*values: str) -> Callable[[str], bool]:
    return lambda value: value.strip().lower() in values


HARMS: Final = (
    Harm(
        name="CUDA_LAUNCH_BLOCKING",
        when=_on,
        severity=Severity.SLOWS,
        costs="every kernel launch waits for its kernel: CPU and GPU never overlap, and a step cannot be captured",
        do="unset it; set it only while hunting for the line that raised a CUDA error",
    ),
    Harm(
        name="PYTORCH_NO_CUDA_MEMORY_CACHING",
        when=_on,
        severity=Severity.SLOWS,
        costs="every tensor asks the driver for memory, which synchronises; a step cannot be captured",
    ),
    Harm(
        name="TORCH_CUDA_SANITIZER",
        when=_on,
        severity=Severity.SLOWS,
        costs="every operation is checked for data races in Python",
    ),
    Harm(
        name="NVIDIA_TF32_OVERRIDE",
        when=_is("0"),
        severity=Severity.SLOWS,
        costs="TF32 stays off whatever a program asks for: fp32 matrix products on Ampere and later GPUs "
        "run at a fraction of the rate",
    ),
    Harm(
        name="NVIDIA_TF32_OVERRIDE",
        when=_is("1"),
        severity=Severity.NOTE,
        costs="fp32 may run as TF32 where a program asked for full precision: comparisons with fp32 "
        "are not what they say",
    ),
    Harm(
        name="TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        when=_on,
        severity=Severity.NOTE,
        costs="TF32 is on from the start: the fp32 baseline already has it, so it cannot be measured as a gain",
        do="unset it, and let the run decide by measuring",
    ),
    Harm(
        name="TORCHDYNAMO_DISABLE",
        when=_on,
        severity=Severity.SLOWS,
        costs="torch.compile silently does nothing, so it can never pay",
    ),
    Harm(
        name="TORCH_COMPILE_DISABLE",
        when=_on,
        severity=Severity.SLOWS,
        costs="torch.compile silently does nothing, so it can never pay",
    ),
    Harm(
        name="TORCH_SHOW_CPP_STACKTRACES",
        when=_on,
        severity=Severity.NOTE,
        costs="every torch error looks up a C++ stack, which can take seconds: recovery from out-of-memory is slow",
    ),
    Harm(
        name="TORCH_USE_CUDA_DSA",
        when=_on,
        severity=Severity.NOTE,
        costs="nothing: it is a switch for building torch and does nothing at run time",
    ),
    Harm(
        name="TORCH_DISTRIBUTED_DEBUG",
        when=_is("detail"),
        severity=Severity.SLOWS,
        costs="every collective of a run on several GPUs is checked against the other ranks first",
    ),
    Harm(
        name="NCCL_P2P_DISABLE",
        when=_on,
        severity=Severity.SLOWS,
        costs="GPUs exchange gradients through host memory: several GPUs pay less",
        do="unset it, unless it cures a hang on this machine",
    ),
    Harm(
        name="CUDA_DEVICE_MAX_CONNECTIONS",
        when=_is("1"),
        severity=Severity.NOTE,
        costs="all streams share one hardware queue: copies may wait behind kernels",
    ),
    Harm(
        name="CUDA_MODULE_LOADING",
        when=_is("eager"),
        severity=Severity.NOTE,
        costs="all kernels are loaded at the start: seconds and some hundred MiB of GPU memory",
    ),
    Harm(
        name="CUDA_CACHE_DISABLE",
        when=_on,
        severity=Severity.NOTE,
        costs="kernels compiled by the driver are compiled again at every start",
    ),
    Harm(
        name="CUDA_FORCE_PTX_JIT",
        when=_on,
        severity=Severity.SLOWS,
        costs="the driver compiles every kernel anew: minutes at the start",
    ),
    Harm(
        name="CUBLAS_WORKSPACE_CONFIG",
        when=_is(":16:8"),
        severity=Severity.NOTE,
        costs="cuBLAS has next to no workspace: some matrix products run slower",
        do="unset it, or use :4096:8, which is deterministic as well",
    ),
    Harm(
        name="TOKENIZERS_PARALLELISM",
        when=lambda value: bool(value.strip()) and not _on(value),
        severity=Severity.SLOWS,
        costs="tokenising uses one core",
        do="unset it; tokenise once before workers start, then threads and forked workers do not meet",
    ),
    Harm(
        name="TOKENIZERS_PARALLELISM",
        when=_on,
        severity=Severity.NOTE,
        costs="a tokenizer used before loader workers fork can deadlock inside them",
        do="tokenise once before workers start, or set it to false in the workers",
    ),
    Harm(
        name="PYTHONDEVMODE",
        when=_on,
        severity=Severity.SLOWS,
        costs="Python checks every allocation: data loading and the step's own Python slow down",
    ),
    Harm(
        name="PYTHONTRACEMALLOC",
        when=_on,
        severity=Severity.SLOWS,
        costs="Python records a stack for every allocation: data loading slows down",
    ),
    Harm(
        name="PYTHONMALLOC",
        when=lambda value: "debug" in value.lower(),
        severity=Severity.SLOWS,
        costs="Python checks every allocation: data loading and the step's own Python slow down",
    ),
)
