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


RECORDED: Final = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_CACHE_DISABLE",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_DEVICE_ORDER",
    "CUDA_FORCE_PTX_JIT",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUDA_VISIBLE_DEVICES",
    "HOTLAP_PRETEND",
    "HOTLAP_WORKERS",
    "KAGGLE_KERNEL_RUN_TYPE",
    "COLAB_RELEASE_TAG",
    "MKL_NUM_THREADS",
    "NCCL_DEBUG",
    "NCCL_P2P_DISABLE",
    "NUM_WORKERS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTHONDEVMODE",
    "PYTHONMALLOC",
    "PYTHONTRACEMALLOC",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TOKENIZERS_PARALLELISM",
    "TORCHDYNAMO_DISABLE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_COMPILE_DISABLE",
    "TORCH_CUDA_SANITIZER",
    "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_SHOW_CPP_STACKTRACES",
    "TORCH_USE_CUDA_DSA",
)
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
