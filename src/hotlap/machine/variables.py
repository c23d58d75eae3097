"""Environment variables that matter to training: what each costs, and what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from hotlap.core.errors import MachineError
from hotlap.machine.limits import most_workers
from hotlap.machine.problems import Problem, Severity


@dataclass(frozen=True)
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


_SLOWS, _NOTE = Severity.SLOWS, Severity.NOTE
HARMS: Final = (
    Harm("CUDA_LAUNCH_BLOCKING", _on, _SLOWS,
         "every kernel launch waits for its kernel: CPU and GPU never overlap, and a step cannot be captured",
         "unset it; set it only while hunting for the line that raised a CUDA error"),
    Harm("PYTORCH_NO_CUDA_MEMORY_CACHING", _on, _SLOWS,
         "every tensor asks the driver for memory, which synchronises; a step cannot be captured"),
    Harm("TORCH_CUDA_SANITIZER", _on, _SLOWS, "every operation is checked for data races in Python"),
    Harm("NVIDIA_TF32_OVERRIDE", _is("0"), _SLOWS,
         "TF32 stays off whatever a program asks for: fp32 matrix products on Ampere and later GPUs run at a "
         "fraction of the rate"),
    Harm("NVIDIA_TF32_OVERRIDE", _is("1"), _NOTE,
         "fp32 may run as TF32 where a program asked for full precision: comparisons with fp32 are not what they say"),
    Harm("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", _on, _NOTE,
         "TF32 is on from the start: the fp32 baseline already has it, so it cannot be measured as a gain",
         "unset it, and let the run decide by measuring"),
    Harm("TORCHDYNAMO_DISABLE", _on, _SLOWS, "torch.compile silently does nothing, so it can never pay"),
    Harm("TORCH_COMPILE_DISABLE", _on, _SLOWS, "torch.compile silently does nothing, so it can never pay"),
    Harm("TORCH_SHOW_CPP_STACKTRACES", _on, _NOTE,
         "every torch error looks up a C++ stack, which can take seconds: recovery from out-of-memory is slow"),
    Harm("TORCH_USE_CUDA_DSA", _on, _NOTE, "nothing: it is a switch for building torch and does nothing at run time"),
    Harm("TORCH_DISTRIBUTED_DEBUG", _is("detail"), _SLOWS,
         "every collective of a run on several GPUs is checked against the other ranks first"),
    Harm("NCCL_P2P_DISABLE", _on, _SLOWS,
         "GPUs exchange gradients through host memory: several GPUs pay less",
         "unset it, unless it cures a hang on this machine"),
    Harm("CUDA_DEVICE_MAX_CONNECTIONS", _is("1"), _NOTE,
         "all streams share one hardware queue: copies may wait behind kernels"),
    Harm("CUDA_MODULE_LOADING", _is("eager"), _NOTE,
         "all kernels are loaded at the start: seconds and some hundred MiB of GPU memory"),
    Harm("CUDA_CACHE_DISABLE", _on, _NOTE, "kernels compiled by the driver are compiled again at every start"),
    Harm("CUDA_FORCE_PTX_JIT", _on, _SLOWS, "the driver compiles every kernel anew: minutes at the start"),
    Harm("CUBLAS_WORKSPACE_CONFIG", _is(":16:8"), _NOTE,
         "cuBLAS has next to no workspace: some matrix products run slower",
         "unset it, or use :4096:8, which is deterministic as well"),
    Harm("TOKENIZERS_PARALLELISM", lambda value: bool(value.strip()) and not _on(value), _SLOWS,
         "tokenising uses one core",
         "unset it; tokenise once before workers start, then threads and forked workers do not meet"),
    Harm("TOKENIZERS_PARALLELISM", _on, _NOTE,
         "a tokenizer used before loader workers fork can deadlock inside them",
         "tokenise once before workers start, or set it to false in the workers"),
    Harm("PYTHONDEVMODE", _on, _SLOWS,
         "Python checks every allocation: data loading and the step's own Python slow down"),
    Harm("PYTHONTRACEMALLOC", _on, _SLOWS, "Python records a stack for every allocation: data loading slows down"),
    Harm("PYTHONMALLOC", lambda value: "debug" in value.lower(), _SLOWS,
         "Python checks every allocation: data loading and the step's own Python slow down"),
)  # fmt: skip

RECORDED: Final = (
    "CUBLAS_WORKSPACE_CONFIG", "CUDA_CACHE_DISABLE", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_ORDER",
    "CUDA_FORCE_PTX_JIT", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "CUDA_VISIBLE_DEVICES", "HOTLAP_PRETEND",
    "HOTLAP_WORKERS", "KAGGLE_KERNEL_RUN_TYPE", "COLAB_RELEASE_TAG", "MKL_NUM_THREADS", "NCCL_DEBUG",
    "NCCL_P2P_DISABLE", "NUM_WORKERS", "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS", "PYTHONDEVMODE", "PYTHONMALLOC",
    "PYTHONTRACEMALLOC", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TOKENIZERS_PARALLELISM", "TORCHDYNAMO_DISABLE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_COMPILE_DISABLE",
    "TORCH_CUDA_SANITIZER", "TORCH_DISTRIBUTED_DEBUG", "TORCH_SHOW_CPP_STACKTRACES", "TORCH_USE_CUDA_DSA",
)  # fmt: skip
"""The only variables that hotlap writes down: none of them can hold a secret."""


def recorded(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter and are set, cut to a length no setting needs."""
    return {name: environ[name][:200] for name in RECORDED if name in environ}


def workers_wanted(environ: Mapping[str, str] | None = None, cores: int | None = None) -> int | None:
    """How many loader workers the environment asks for: HOTLAP_WORKERS, else NUM_WORKERS, else None.

    Raises MachineError where the value is not a whole number from 0 up, or far more than there are cores.
    """
    seen = os.environ if environ is None else environ
    for name in ("HOTLAP_WORKERS", "NUM_WORKERS"):
        value = seen.get(name, "").strip()
        if not value:
            continue
        if not re.fullmatch(r"[0-9]{1,6}", value):
            raise MachineError(f"{name}={value[:40]!r} is not a number of workers; set it to 0 or more, or unset it")
        count, most = int(value), most_workers(cores)
        if count > most:
            raise MachineError(f"{name}={count} is too many workers for this process; set it to {most} or less")
        return count
    return None


def variable_problems(environ: Mapping[str, str], cores: int) -> list[Problem]:
    """Every variable that is set in a way that harms, given the cores this process may use."""
    found = [
        Problem(
            key=harm.name.lower().replace("_", "-"),
            severity=harm.severity,
            what=f"{harm.name}={environ[harm.name][:60]}",
            costs=harm.costs,
            do=harm.do,
        )
        for harm in HARMS
        if harm.name in environ and harm.when(environ[harm.name])
    ]
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        found += _threads(name, environ.get(name), cores)
    return found + _workers(environ, cores) + _allocator(environ)


def _threads(name: str, value: str | None, cores: int) -> list[Problem]:
    key = name.lower().replace("_", "-")
    if value is None or not value.strip():
        return []
    # OpenMP allows a list, one number per level of nesting; the first is the one that counts.
    count = re.match(r"\s*([0-9]{1,6})\b", value)
    if count is None or int(count[1]) == 0:
        costs, severity = "it is not a number of threads and is ignored", Severity.NOTE
    elif int(count[1]) > cores:
        costs = f"more threads than the {cores} cores allowed here: they push each other aside"
        severity = Severity.SLOWS
    elif int(count[1]) == 1 and cores > 1:
        costs = f"maths on the CPU uses one of {cores} cores (torchrun sets this by itself)"
        severity = Severity.NOTE
    else:
        return []
    return [
        Problem(
            key=key,
            severity=severity,
            what=f"{name}={value.strip()[:60]}",
            costs=costs,
            do=f"unset it, or set it to {cores} or less",
        )
    ]


def _workers(environ: Mapping[str, str], cores: int) -> list[Problem]:
    try:
        wanted = workers_wanted(environ, cores)
    except MachineError as error:
        return [
            Problem(
                key="workers",
                severity=Severity.STOPS,
                what=str(error).partition(";")[0],
                costs="a run would stop at once, since that is no number of workers that can be started",
                do=f"set it to a number from 0 to {max(1, cores - 1)}, or unset it",
            )
        ]
    if wanted is None or wanted <= cores:
        return []
    name = "HOTLAP_WORKERS" if environ.get("HOTLAP_WORKERS", "").strip() else "NUM_WORKERS"
    return [
        Problem(
            key="workers",
            severity=Severity.SLOWS,
            what=f"{name}={wanted}, with {cores} core{'s' if cores > 1 else ''} allowed here",
            costs="workers push each other and the training process aside, and each holds memory",
            do=f"set it to {max(1, cores - 1)} or less, or unset it: hotlap measures how many pay",
        )
    ]


def _allocator(environ: Mapping[str, str]) -> list[Problem]:
    names = [name for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF") if name in environ]
    found = []
    if len(names) == 2 and environ[names[0]] != environ[names[1]]:
        found.append(
            Problem(
                key="pytorch-alloc-conf",
                severity=Severity.NOTE,
                what=f"{names[0]} and {names[1]} disagree",
                costs="which of them counts depends on the version of torch",
                do="set one of them (PYTORCH_CUDA_ALLOC_CONF is known to every version)",
            )
        )
    for name in names:
        split = re.search(r"max_split_size_mb:(\d+)", environ[name])
        if split and int(split[1]) < 32:
            harm = "blocks above that size are never split: memory is reserved and not used"
        elif "backend:cudaMallocAsync" in environ[name]:
            harm = "torch's own allocator is off: memory cannot be profiled, and some captures fail"
        else:
            continue
        found.append(
            Problem(
                key=name.lower().replace("_", "-"),
                severity=Severity.NOTE,
                what=f"{name}={environ[name][:60]}",
                costs=harm,
                do="unset it; against fragmentation use expandable_segments:True",
            )
        )
    return found
